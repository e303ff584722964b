"""The virtual GPU as the scheduler's observer (host time by phase, ranges, steps) and as its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...sched.observe import Observer, StepInfo, StepKind

if TYPE_CHECKING:
    import torch

    from ..platform.hardware import HardwareProfile
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
        self._costs = _PhaseCosts(hardware)
        self._kinds: dict[int, StepKind] = {}  # of steps that are not settled yet

    def range(self, name: str, step: int, size: int) -> EmulatedRange:
        return EmulatedRange(self._runtime, name, step, size, self._costs[name, self._kinds.get(step)])

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


class _PhaseCosts(dict[tuple[str, StepKind | None], tuple[float, float]]):
    """What a phase costs the host in a step of that kind: a + b * size, ns."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self._phases = hardware.phases

    def __missing__(self, key: tuple[str, StepKind | None]) -> tuple[float, float]:
        name, kind = key
        phase = self._phases.get(name)
        line = None if phase is None else phase.kinds.get(kind, phase) if kind else phase
        self[key] = (0.0, 0.0) if line is None else (line.a.value, line.b.value)
        return self[key]


class EmulatedRange:
    """A range while it is open."""

    __slots__ = ("_cost", "_name", "_outer", "_runtime", "_size", "_start", "_step")

    def __init__(self, runtime: Runtime, name: str, step: int, size: int, cost: tuple[float, float]) -> None:
        self._runtime = runtime
        self._name = name
        self._step = step
        self._size = size
        self._cost = cost

    def __enter__(self) -> None:
        runtime, (a, b) = self._runtime, self._cost
        self._start = now = runtime.now
        self._outer = outer = runtime.context
        runtime.context = outer.inside(self._name, self._step)
        runtime.now = now + round(a + b * self._size)

    def __exit__(self, *raised: object) -> None:
        runtime = self._runtime
        runtime.context = self._outer
        runtime.ledger.ranges.append((self._name, self._step, self._size, self._start, runtime.now))
