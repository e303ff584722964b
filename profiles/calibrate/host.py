"""Measures the scheduler's host phases on this machine, in runs on a virtual GPU whose calls take no host time.

The host's clock advances by real time while the scheduler's Python runs, and stands still inside the virtual GPU
(``vgpu.host_time``). So a phase's time is that of the scheduler itself, on this processor.

It is the phase's own time: its range without the phases inside it and without its device calls. A hardware profile's
phases are charged in the same way. A range that is no phase belongs to the enclosing phase::

    settle  |----- own -----|  copy  |--- own ---| sync, 40 us |-- own --|
    conclude                                |  own, settle's |
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Self

import torch

from ...sched.observe import Clock, Observer, StepKind
from ..platform.hardware import HardwareProfile
from ..platform.resolve import ask
from ..ranks.execute import Options, execute, whole
from ..record.timeline import Call, Names, Range, Window
from ..run.machines import one_thread
from ..vgpu.gpu import open_vgpu
from ..vgpu.host_time import measured, without_own_time
from .fit import FittedLine, TimedSample, fit

STATE: Final = "latest"  # the relay state whose phases are measured

_NEW_TOKENS: Final = 24
_STEADY: Final = (
    "receive", "admit", "prepare", "settle", "resolve", "model", "sample", "publish", "flatten_numpy",
)  # fmt: skip
_DRAFTS: Final = ("draft", "verify", "draft_extend", "lengths", "copy")
# These open before a step's kind is known. The other phases do different work for prompts than for decodes.
_BEFORE_PLANNING: Final = frozenset({"receive", "admit"})
_FITTED_KINDS: Final = frozenset({"prefill", "decode", "mixed"})
_CALLS, _REPEATS = 500, 50  # of the torch calls that through_torch times
_THROUGH_TORCH = ("launch", "copy")  # the calls that torch makes
# By phase and kind of step, None for all kinds.
FittedLines = dict[tuple[str, StepKind | None], FittedLine]
PhaseSamples = dict[tuple[str, StepKind | None], list[TimedSample]]


class PhaseCollector(Observer):
    """Collects a run's ranges and calls, and the times at which steps were planned."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.calls: list[Call] = []
        self._clock: Clock | None = None
        # By step, in order of time.
        self._plans: defaultdict[int, list[tuple[int, StepKind]]] = defaultdict(list)

    def watch(self, clock: Clock, total: int) -> AbstractContextManager[Self]:  # noqa: ARG002
        """Make this the run's observer."""
        self._clock = clock
        self._plans.clear()
        return nullcontext(self)

    def planned(self, step: int, kind: StepKind) -> None:
        assert self._clock is not None
        self._plans[step].append((self._clock.now(), kind))

    def kind_of(self, span: Range) -> StepKind | None:
        """The kind of the range's step, if it was known when the range opened."""
        known = [kind for at, kind in self._plans.get(span.step, ()) if at <= span.start]
        return known[-1] if known else None

    def begin(self) -> None:
        self.ranges.clear()
        self.calls.clear()

    def feed(self, window: Window) -> None:
        self.ranges += window.ranges
        self.calls += window.calls

    def finish(self, names: Names) -> None: ...


def own_times(
    ranges: Sequence[Range],
    calls: Sequence[Call],
    *,
    phases: Collection[str],
    through_torch: float,
    kind_of: Callable[[Range], StepKind | None] = lambda _: None,
) -> tuple[PhaseSamples, float]:
    """The samples, each for all kinds, and for the kind of its step if that was known; and the time of the whole run in
    ranges outside all phases, in ns.

    ``through_torch`` is the time of torch's own part of a device call, in ns, which no record contains. ``kind_of``
    returns the kind of a range's step, for samples by kind.
    """
    spent = _calls_within(ranges, calls, through_torch)
    own = defaultdict[int | None, float](float)  # by the range of the phase, None outside all phases
    enclosing: list[tuple[int, int | None]] = []  # each with the range of the phase that it belongs to
    for index in sorted(range(len(ranges)), key=lambda i: (ranges[i].start, -ranges[i].end, -i)):
        span = ranges[index]
        while enclosing and not _within(span, ranges[enclosing[-1][0]]):
            enclosing.pop()
        around = enclosing[-1][1] if enclosing else None
        owner = index if span.name in phases else around
        if enclosing:
            own[around] -= span.end - span.start
        own[owner] += span.end - span.start - spent[index]
        enclosing.append((index, owner))
    outside = own.pop(None, 0.0)
    samples = defaultdict[tuple[str, StepKind | None], list[TimedSample]](list)
    for phase, ns in own.items():
        assert phase is not None
        span = ranges[phase]
        for kind in dict.fromkeys((None, kind_of(span))):
            samples[span.name, kind].append(TimedSample(span.size, max(ns, 0.0)))
    return dict(samples), outside


def _within(inner: Range, outer: Range) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end and inner.start < outer.end


def _calls_within(
    ranges: Sequence[Range], calls: Sequence[Call], through_torch: float
) -> defaultdict[int, float]:
    """ns of the device calls directly in each range. A call has the name of its range, which is then found by time."""
    named = defaultdict[str, list[tuple[int, int]]](list)
    for index, span in enumerate(ranges):
        named[span.name].append((span.start, index))
    for starts in named.values():
        starts.sort()
    spent = defaultdict[int, float](float)
    for call in calls:
        starts = named[call.range]
        place = bisect_right(starts, (call.start, len(ranges))) - 1
        if place >= 0:
            taken = call.end - call.start + (through_torch if call.kind in _THROUGH_TORCH else 0)
            spent[starts[place][1]] += taken
    return spent


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """A scenario, and the phases whose samples are taken from its run."""

    scenario: str
    overrides: tuple[str, ...]
    phases: tuple[str, ...]
    kind: StepKind | None = None  # the only kind of steps that samples are taken of

    def __str__(self) -> str:
        return " ".join((self.scenario, *(text for text in self.overrides if text.startswith("workload."))))


def calibration_runs(batches: Sequence[int], prompts: Sequence[int]) -> list[CalibrationRun]:
    """Every batch size with every prompt length, and runs for flattening by lists, for drafts, and for mixed steps."""
    plan = [
        CalibrationRun("overlap_on", _workload(size, length), _STEADY)
        for size in batches
        for length in prompts
    ]
    plan += [
        CalibrationRun("overlap_on", (*_workload(size, length), "engine.relay.flatten=list"), ("flatten",))
        for size in (min(batches), max(batches))
        for length in prompts
    ]
    plan += [CalibrationRun("spec_v2", _workload(min(size, 16), prompts[0]), _DRAFTS) for size in batches]
    # Prompts in chunks, mixed with the decodes of earlier requests, in a tiny model without values.
    mixing = ("workload.arrival=burst", "model.preset=tiny-llama", "device.values=none")
    plan += [CalibrationRun("mixed", _requests(2 * size, *mixing), _STEADY, "mixed") for size in batches]
    return list(dict.fromkeys(plan))


def _requests(number: int, *settings: str) -> tuple[str, ...]:
    common = ("measure.warmup_requests=2", "device.host=measured")
    return f"engine.relay={STATE}", f"workload.requests={number}", *settings, *common


def _workload(batch: int, prompt: int) -> tuple[str, ...]:
    """Twice ``batch`` requests, ``batch`` of them at a time: the second half joins as the first half ends."""
    return _requests(
        2 * batch,
        f"workload.arrival={{process: closed, concurrency: {batch}}}",
        f"workload.prompt_tokens={{dist: fixed, value: {prompt}}}",
        f"workload.output_tokens={{dist: fixed, value: {_NEW_TOKENS}}}",
        f"engine.max_running_requests={batch}",
    )


def measure(
    hardware: HardwareProfile,
    plan: Iterable[CalibrationRun],
    *,
    rounds: int,
    notify: Callable[[str], object] = lambda _: None,
) -> tuple[PhaseSamples, dict[str, float]]:
    """The samples of all phases, and what the document says beside them: ns of torch's own part of a call on a device
    tensor, which no sample contains, and the time per step in ranges that are no phase. Everything is run ``rounds``
    times, interleaved, so that a slow minute of the machine does not affect one size only."""
    plan, silent = list(plan), without_calls(hardware)
    through = through_torch(silent)
    samples, outside, steps = defaultdict[tuple[str, StepKind | None], list[TimedSample]](list), 0.0, 0
    for _ in range(rounds):
        for run in plan:
            notify(str(run))
            collector, count = _run(run, silent)
            found, beside = own_times(
                collector.ranges,
                collector.calls,
                phases=hardware.phases,
                through_torch=through,
                kind_of=collector.kind_of,
            )
            outside, steps = outside + beside, steps + count
            for name in run.phases:
                for key in found:
                    if key[0] == name and run.kind in (None, key[1]):
                        samples[key] += found[key]
    return dict(samples), {"through_torch_ns": through, "outside_us_per_step": outside / 1e3 / max(steps, 1)}


def fit_lines(samples: PhaseSamples) -> FittedLines:
    """The lines of all phases; after them, for the phases that open once a step's kind is known, those of its kinds."""
    phases = [key for key in samples if key[1] is None]
    kinds = [
        (name, kind)
        for name, kind in sorted(samples.keys() - phases)
        if name not in _BEFORE_PLANNING and kind in _FITTED_KINDS and (name, "decode") in samples
    ]
    return {key: fit(samples[key]) for key in (*phases, *kinds)}


def _run(run: CalibrationRun, hardware: HardwareProfile) -> tuple[PhaseCollector, int]:
    question = replace(ask(run.scenario, run.overrides), hardware=hardware)
    collector = PhaseCollector()
    result = whole(execute(question, Options("vgpu"), observe=collector.watch, extra_sinks=[collector]))
    return collector, sum(kind.steps for name, kind in result.per_step.items() if "." not in name)


def without_calls(hardware: HardwareProfile) -> HardwareProfile:
    """A profile without host time of calls, so that all time between calls is measured."""
    bare = without_own_time(hardware)
    host = {name: quantity and quantity.model_copy(update={"value": 0.0}) for name, quantity in bare.host}
    memcpy = hardware.copies.host_memcpy.model_copy(update={"value": 1e18})
    return bare.model_copy(
        update={
            "host": bare.host.model_copy(update=host),
            "copies": hardware.copies.model_copy(update={"host_memcpy": memcpy}),
        }
    )


def through_torch(hardware: HardwareProfile) -> float:
    """ns of torch's own part of a call on a device tensor: the median over some calls with few operands, each timed in
    the least disturbed of some repeats, since a time that is too long would leave phases none of their own.
    ``hardware`` has no host time of calls."""
    with one_thread(), open_vgpu(hardware) as gpu, measured(gpu) as stopwatch:
        x, index = torch.zeros(64, device=gpu.device), torch.zeros(8, dtype=torch.int64, device=gpu.device)
        actions = (lambda: x.add_(1), lambda: x + x, lambda: torch.index_select(x, 0, index))
        with stopwatch.running():
            times = [min(_times(gpu.runtime, action)) for action in actions]
    return median(times)


def _times(clock: Any, action: Callable[[], Any]) -> Iterator[float]:
    """ns per call."""
    for _ in range(_REPEATS):
        before = clock.now
        for _ in range(_CALLS):
            action()
        yield (clock.now - before) / _CALLS
