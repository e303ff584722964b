"""The simulation of a device whose streams may wait for those of other ranks' devices."""

from __future__ import annotations

from ..vgpu.engine import FOREVER, QUEUES, EventRecording, Simulation
from .rank_threads import AwaitedMark, Member


class SharedSimulation(Simulation):
    """The simulation of one rank's device. It is advanced only together with those of the other ranks, and no further
    than the lowest host clock."""

    def __init__(self, *, gap: int, member: Member) -> None:
        super().__init__(gap=gap, first=member.rank * QUEUES)
        self._member = member

    def settle(self, now: int) -> None:
        self._member.settle(now)

    def wait(self, mark: EventRecording) -> int:
        if mark.time is None and not self._member.in_order:
            self.run(FOREVER, mark, alone=True)
        if mark.time is None:
            self._member.wait(AwaitedMark(mark))
        assert mark.time is not None, "what is waited for has been launched"
        return mark.time

    def drain(self) -> int:
        for mark in [self.record(queue, 0) for queue in self._queues]:
            self.wait(mark)
        return max((queue.tail for queue in self._queues), default=0)
