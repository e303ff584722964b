"""The scheduler's own host phases, measured on this machine: runs on a virtual GPU whose calls take no host time.

The host's clock runs by real time while the scheduler's Python runs, and stands still in the virtual GPU
(``vgpu.host_time``). What remains of a phase is what the scheduler itself takes, on this processor.
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
from ..platform.resolve import Resolved, ask
from ..ranks.execute import Options, execute
from ..run.machines import one_thread
from ..vgpu import open_vgpu
from ..vgpu.host_time import measured, without_own_time
from .fit import FittedLine, TimedSample, fit
from .own_time import Collector, own_times

BATCHES: Final = (1, 4, 16, 64)
PROMPTS: Final = (32, 256, 1024)  # tokens
ROUNDS: Final = 2
STATE: Final = "latest"  # the relay state whose phases are measured

_NEW_TOKENS: Final = 24
_STEADY: Final = (
    "receive", "admit", "prepare", "settle", "resolve", "model", "sample", "publish", "flatten_numpy",
)  # fmt: skip
_DRAFTS: Final = ("draft", "verify", "draft_extend", "lengths", "copy")
# A step's kind is not known yet when these open. What prompts and decodes do in the others is not the same work.
_BEFORE_PLANNING: Final = frozenset({"receive", "admit"})
_APART: Final = frozenset({"prefill", "decode", "mixed"})
_CALLS, _REPEATS = 500, 9  # of torch calls whose way to the device is timed


@dataclass(frozen=True, slots=True)
class Errand:
    """A run, and the phases that are taken from it."""

    scenario: str
    overrides: tuple[str, ...]
    phases: tuple[str, ...]
    kind: StepKind | None = None  # of the only steps that it is for


class HostTimes(NamedTuple):
    """``through_torch``: ns of torch's own part of a call on a device tensor, left out of all samples.
    ``outside``: us per step in ranges that are no phase. ``kinds``: of phases that know their step's kind."""

    phases: dict[str, list[TimedSample]]
    through_torch: float
    outside_us: float
    kinds: dict[tuple[str, StepKind], list[TimedSample]] = {}  # noqa: RUF012 - nobody writes it


def errands(batches: Sequence[int] = BATCHES, prompts: Sequence[int] = PROMPTS) -> list[Errand]:
    """Every batch size with every prompt length; flattening by lists, drafts, and prompts with decodes on top."""
    plan = [Errand("overlap_on", _workload(size, length), _STEADY) for size in batches for length in prompts]
    plan += [
        Errand("overlap_on", (*_workload(size, length), "engine.relay.flatten=list"), ("flatten",))
        for size in (min(batches), max(batches))
        for length in prompts
    ]
    plan += [Errand("spec_v2", _workload(min(size, 16), prompts[0]), _DRAFTS) for size in batches]
    plan += [Errand("mixed", _mixing(2 * size), _STEADY, "mixed") for size in batches]
    return list(dict.fromkeys(plan))


def _mixing(requests: int) -> tuple[str, ...]:
    """Prompts that come in chunks, with the decodes of those that came before: of another model, whose device takes
    no time and computes nothing."""
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
    """Two rounds of ``batch`` requests: one prompts and decodes as one, the other joins as the first ends."""
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
    plan: Iterable[Errand],
    *,
    rounds: int = ROUNDS,
    tell: Callable[[Errand], object] = lambda _: None,
) -> HostTimes:
    """Every errand ``rounds`` times, interleaved, so that a slow minute of the machine does not fall on one size."""
    plan, silent = list(plan), without_calls(hardware)
    through = through_torch(silent)
    phases, outside, steps = defaultdict[str, list[TimedSample]](list), 0.0, 0
    kinds = defaultdict[tuple[str, StepKind], list[TimedSample]](list)
    for _ in range(rounds):
        for errand in plan:
            tell(errand)
            collector, ran = _run(errand, silent)
            found = own_times(
                collector.ranges,
                collector.calls,
                phases=hardware.phases,
                through_torch=through,
                kind_of=collector.kind_of,
            )
            outside, steps = outside + found.outside, steps + ran
            for name in errand.phases if errand.kind is None else ():
                phases[name] += found.phases.get(name, ())
            for (name, kind), samples in found.kinds.items():
                if name in errand.phases and errand.kind in (None, kind):
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
    """Of prompts, decodes and both in one, in phases that have them."""
    return {
        (name, kind): fit(samples)
        for (name, kind), samples in sorted(times.kinds.items())
        if name not in _BEFORE_PLANNING and kind in _APART and (name, "decode") in times.kinds
    }


def _run(errand: Errand, hardware: HardwareProfile) -> tuple[Collector, int]:
    question, collector = replace(_asked(errand), hardware=hardware), Collector()
    options = Options(device="vgpu")
    result = execute(
        question, question.relays[0], options, observe=collector.watch, extra_sink=collector
    ).result
    if result.run.cancelled:
        raise KeyboardInterrupt
    return collector, sum(kind.steps for name, kind in result.per_step.items() if "." not in name)


def _asked(errand: Errand) -> Resolved:
    return ask(errand.scenario, errand.overrides)


def without_calls(hardware: HardwareProfile) -> HardwareProfile:
    """The profile of a device whose calls take no host time: what the clock then shows between calls was measured."""
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
    """ns from a torch call on a device tensor to the device's door and back: median over some calls of few operands.
    ``hardware`` charges nothing for calls."""
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
    """ns per call by that clock."""
    for _ in range(_REPEATS):
        before = clock.now
        for _ in range(_CALLS):
            action()
        yield (clock.now - before) / _CALLS
