"""The virtual GPU as the scheduler's observer (host time by phase, ranges, steps) and as its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...sched.observe import RANGES, Observer, StepInfo, StepKind

if TYPE_CHECKING:
    import torch

    from .ledger import PlainContext
    from .runtime import Runtime


class VirtualClock:
    """The host's virtual time, in ns."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def now(self) -> int:
        return self._runtime.now

    def sleep_until(self, at: int) -> None:
        self._runtime.now = max(self._runtime.now, at)


class _PhaseCost(dict[int, int]):
    """What a range costs the host in ns, by its size: a + b * size. ``forward``: whether it is the forward's, None if
    that follows from the range around it."""

    def __init__(self, a: float, b: float, forward: bool | None) -> None:
        self.a = a
        self.b = b
        self.forward = forward

    def __missing__(self, size: int) -> int:
        cost = self[size] = round(self.a + self.b * size)
        return cost


class HostObserver(Observer):
    """Charges each phase's host cost when the phase begins, and labels the records inside it.

    It is the context manager of its ranges, too: what is entered is the range that was asked for last, and what is left
    is the one that was entered last.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ranges = runtime.ledger.ranges
        self.streams: dict[int, str] = {runtime.default.id: "default"}
        self._phases: dict[tuple[str, StepKind | None], _PhaseCost] = {}
        self._kinds: dict[int, StepKind] = {}  # of steps that are not settled yet
        self._asked: tuple[str, int, int]
        # Name, step, size and start of each open range, and the context around it.
        self._open: list[tuple[str, int, int, int, PlainContext]] = []

    def range(self, name: str, step: int, size: int) -> HostObserver:
        self._asked = name, step, size
        return self

    def __enter__(self) -> None:
        runtime, (name, step, size) = self._runtime, self._asked
        kind = self._kinds.get(step)
        try:
            cost = self._phases[name, kind]
        except KeyError:
            cost = self._phase(name, kind)
        now, outer = runtime.now, runtime.context
        self._open.append((name, step, size, now, outer))
        forward = cost.forward
        runtime.context = (name, step, outer[2] if forward is None else forward)
        runtime.now = now + cost[size]

    def __exit__(self, *raised: object) -> None:
        runtime = self._runtime
        name, step, size, start, outer = self._open.pop()
        runtime.context = outer if self._open else ("", step, False)  # as ``LedgerContext.after``
        self._ranges.append((name, step, size, start, runtime.now))

    def _phase(self, name: str, kind: StepKind | None) -> _PhaseCost:
        """The cost of a range of that name in a step of that kind."""
        phase, category = self._runtime.hardware.phases.get(name), RANGES.get(name)
        line = None if phase is None else phase.kinds.get(kind, phase) if kind else phase
        a, b = (0.0, 0.0) if line is None else (line.a.value, line.b.value)
        forward = None if category is None else category == "forward"
        found = self._phases[name, kind] = _PhaseCost(a, b, forward)
        return found

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
