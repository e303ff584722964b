"""The virtual GPU as the scheduler's observer (host time by phase, ranges, steps) and as its clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...sched.observe import Observer, StepInfo, StepKind
from ..record.timeline import Range

if TYPE_CHECKING:
    import torch

    from ..platform.hardware import HardwareProfile
    from .ledger import LedgerContext
    from .runtime import Runtime


class VirtualClock:
    """The host's virtual time, in ns."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def now(self) -> int:
        return self._runtime.now

    def sleep_until(self, at: int) -> None:
        self._runtime.now = max(self._runtime.now, at)


class HostObserver(Observer):
    """Charges each phase's host cost when the phase begins, and labels the records inside it."""

    def __init__(self, runtime: Runtime, hardware: HardwareProfile) -> None:
        self._runtime = runtime
        self.streams: dict[int, str] = {runtime.default.id: "default"}
        self._costs: Mapping[str, tuple[float, float]] = {
            name: (phase.a.value, phase.b.value) for name, phase in hardware.phases.items()
        }
        self._of_kind: Mapping[tuple[str, StepKind | None], tuple[float, float]] = {
            (name, kind): (line.a.value, line.b.value)
            for name, phase in hardware.phases.items()
            for kind, line in phase.kinds.items()
        }
        self._kinds: dict[int, StepKind] = {}  # of steps that are not settled yet

    def range(self, name: str, step: int, size: int) -> EmulatedRange:
        cost = self._of_kind.get((name, self._kinds.get(step))) or self._costs.get(name)
        return EmulatedRange(self._runtime, name, step, size, cost)

    def stream(self, name: str, stream: torch.Stream) -> None:
        """A stream on a share of the GPU gets the number of the stream of the same name, with which it takes turns."""
        number = next((known for known, other in self.streams.items() if other == name), stream.stream_id)
        self._runtime.simulation.renumber_partition(stream.stream_id, number)
        self.streams[stream.stream_id] = name

    def planned(self, step: int, kind: StepKind) -> None:
        self._kinds[step] = kind

    def launched(self, info: StepInfo) -> None:
        self._runtime.ledger.launched(info)

    def settled(self, info: StepInfo) -> None:
        self._kinds.pop(info.step, None)
        if self._runtime.ledger.settled(info):
            self._runtime.cut(info.step)


@dataclass(slots=True, eq=False)
class EmulatedRange:
    """A range while it is open."""

    runtime: Runtime
    name: str
    step: int
    size: int
    cost: tuple[float, float] | None
    _start: int = field(init=False)
    _outer: LedgerContext = field(init=False)

    def __enter__(self) -> None:
        runtime = self.runtime
        self._start = runtime.now
        self._outer = outer = runtime.context
        runtime.context = outer.inside(self.name, self.step)
        if self.cost is not None:
            a, b = self.cost
            runtime.now += round(a + b * self.size)

    def __exit__(self, *raised: object) -> None:
        runtime = self.runtime
        runtime.context = self._outer
        runtime.ledger.ranges.append(Range(self.name, self.step, self.size, self._start, runtime.now))
