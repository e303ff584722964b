"""Measures the scheduler's host phases on this machine, in runs on a virtual GPU whose calls take no host time.

The host's clock advances by real time while the scheduler's Python runs, and stands still inside the virtual GPU
(``vgpu.host_time``). So a phase's time is that of the scheduler itself, on this processor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from ...sched.observe import StepKind
from ..platform.hardware import HardwareProfile
from ..platform.resolve import ask
from ..ranks.execute import Options, execute
from ..run.machines import one_thread
from ..vgpu.gpu import open_vgpu
from ..vgpu.host_time import measured, without_own_time
from .fit import FittedLine, TimedSample, fit
from .own_time import PhaseCollector, own_times

BATCHES: Final = (1, 4, 16, 64)
PROMPTS: Final = (32, 256, 1024)  # tokens
ROUNDS: Final = 2
STATE: Final = "latest"  # the relay state whose phases are measured

_NEW_TOKENS: Final = 24
_STEADY: Final = (
    "receive", "admit", "prepare", "settle", "resolve", "model", "sample", "publish", "flatten_numpy",
)  # fmt: skip
_DRAFTS: Final = ("draft", "verify", "draft_extend", "lengths", "copy")
# These open before a step's kind is known. The other phases do different work for prompts than for decodes.
_BEFORE_PLANNING: Final = frozenset({"receive", "admit"})
_FITTED_KINDS: Final = frozenset({"prefill", "decode", "mixed"})
_CALLS, _REPEATS = 500, 9  # of the torch calls that through_torch times


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """A scenario, and the phases whose samples are taken from its run."""

    scenario: str
    overrides: tuple[str, ...]
    phases: tuple[str, ...]
    kind: StepKind | None = None  # the only kind of steps that samples are taken of


class HostTimes(NamedTuple):
    """``through_torch``: ns of torch's own part of a call on a device tensor, which no sample contains.
    ``outside_us``: time per step in ranges that are no phase. ``kinds``: samples of steps whose kind was known."""

    phases: dict[str, list[TimedSample]]
    through_torch: float
    outside_us: float
    kinds: dict[tuple[str, StepKind], list[TimedSample]] = {}  # noqa: RUF012 - never written


def calibration_runs(
    batches: Sequence[int] = BATCHES, prompts: Sequence[int] = PROMPTS
) -> list[CalibrationRun]:
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
    plan += [CalibrationRun("mixed", _mixing(2 * size), _STEADY, "mixed") for size in batches]
    return list(dict.fromkeys(plan))


def _mixing(requests: int) -> tuple[str, ...]:
    """Prompts in chunks, mixed with the decodes of earlier requests, in a tiny model without values."""
    return (
        f"engine.relay={STATE}",
        "model.preset=tiny-llama",
        "device.values=none",
        f"workload.requests={requests}",
        "workload.arrival=burst",
        "measure.warmup_requests=2",
        "device.host=measured",
    )


def _workload(batch: int, prompt: int) -> tuple[str, ...]:
    """Twice ``batch`` requests, ``batch`` of them at a time: the second half joins as the first half ends."""
    return (
        f"engine.relay={STATE}",
        f"workload.requests={2 * batch}",
        f"workload.arrival={{process: closed, concurrency: {batch}}}",
        f"workload.prompt_tokens={{dist: fixed, value: {prompt}}}",
        f"workload.output_tokens={{dist: fixed, value: {_NEW_TOKENS}}}",
        f"engine.max_running_requests={batch}",
        "measure.warmup_requests=2",
        "device.host=measured",
    )


def measure(
    hardware: HardwareProfile,
    plan: Iterable[CalibrationRun],
    *,
    rounds: int = ROUNDS,
    notify: Callable[[CalibrationRun], object] = lambda _: None,
) -> HostTimes:
    """Run everything ``rounds`` times, interleaved, so that a slow minute of the machine does not affect one size
    only."""
    plan, silent = list(plan), without_calls(hardware)
    through = through_torch(silent)
    phases, outside, steps = defaultdict[str, list[TimedSample]](list), 0.0, 0
    kinds = defaultdict[tuple[str, StepKind], list[TimedSample]](list)
    for _ in range(rounds):
        for run in plan:
            notify(run)
            collector, count = _run(run, silent)
            found = own_times(
                collector.ranges,
                collector.calls,
                phases=hardware.phases,
                through_torch=through,
                kind_of=collector.kind_of,
            )
            outside, steps = outside + found.outside, steps + count
            for name in run.phases if run.kind is None else ():
                phases[name] += found.phases.get(name, ())
            for (name, kind), samples in found.kinds.items():
                if name in run.phases and run.kind in (None, kind):
                    kinds[name, kind] += samples
    return HostTimes(
        {name: samples for name, samples in phases.items() if samples},
        through,
        outside / 1e3 / steps if steps else 0.0,
        dict(kinds),
    )


def fit_phases(times: HostTimes) -> dict[str, FittedLine]:
    return {name: fit(samples) for name, samples in times.phases.items()}


def fit_kinds(times: HostTimes) -> dict[tuple[str, StepKind], FittedLine]:
    """Lines by phase and kind of step, for the phases that open after the kind is known."""
    return {
        (name, kind): fit(samples)
        for (name, kind), samples in sorted(times.kinds.items())
        if name not in _BEFORE_PLANNING and kind in _FITTED_KINDS and (name, "decode") in times.kinds
    }


def _run(run: CalibrationRun, hardware: HardwareProfile) -> tuple[PhaseCollector, int]:
    question = replace(ask(run.scenario, run.overrides), hardware=hardware)
    collector = PhaseCollector()
    options = Options(device="vgpu")
    result = execute(
        question, question.relays[0], options, observe=collector.watch, extra_sink=collector
    ).result
    if result.run.cancelled:
        raise KeyboardInterrupt
    return collector, sum(kind.steps for name, kind in result.per_step.items() if "." not in name)


def without_calls(hardware: HardwareProfile) -> HardwareProfile:
    """A profile without host time of calls, so that all time between calls is measured."""
    bare = without_own_time(hardware)
    host = {name: quantity.model_copy(update={"value": 0.0}) for name, quantity in bare.host}
    memcpy = hardware.copies.host_memcpy.model_copy(update={"value": 1e18})
    return bare.model_copy(
        update={
            "host": bare.host.model_copy(update=host),
            "copies": hardware.copies.model_copy(update={"host_memcpy": memcpy}),
        }
    )


def through_torch(hardware: HardwareProfile) -> float:
    """ns of torch's own part of a call on a device tensor: the median over some calls with few operands. ``hardware``
    has no host time of calls."""
    with one_thread(), open_vgpu(hardware) as gpu, measured(gpu) as stopwatch:
        x, index = torch.zeros(64, device=gpu.device), torch.zeros(8, dtype=torch.int64, device=gpu.device)
        actions: Mapping[str, Callable[[], Any]] = {
            "add_": lambda: x.add_(1),
            "add": lambda: x + x,
            "index_select": lambda: torch.index_select(x, 0, index),
        }
        with stopwatch.running():
            times = [median(_times(gpu.runtime, action)) for action in actions.values()]
    return median(times)


def _times(clock: Any, action: Callable[[], Any]) -> Iterator[float]:
    """ns per call."""
    for _ in range(_REPEATS):
        before = clock.now
        for _ in range(_CALLS):
            action()
        yield (clock.now - before) / _CALLS
