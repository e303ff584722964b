"""The device's API as a checker hears it: which call orders what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine import EventRecording, PeerEventRecording, Queue, Simulation
from ..runtime import Direction, Runtime
from .clocks import Clocks
from .memory import LastSite

if TYPE_CHECKING:
    from ...platform.hardware import HardwareProfile
    from ...record.timeline import Sink


class OrderedRuntime(Runtime):
    def __init__(
        self,
        hardware: HardwareProfile,
        *,
        sink: Sink | None,
        watch: Sequence[Path],
        simulation: Simulation | None = None,
    ) -> None:
        super().__init__(hardware, sink=sink, watch=watch, simulation=simulation)
        self.sites: LastSite = LastSite(watch)
        self.clocks = Clocks(self.simulation.first)

    def copy(self, direction: Direction, size: int, *, pinned: bool, blocking: bool) -> bool:
        waits = super().copy(direction, size, pinned=pinned, blocking=blocking)
        if waits:
            self._synchronized(self.stream)
        return waits

    def synchronize(self, stream: Queue, *, site: int | None = None) -> None:
        super().synchronize(stream, site=site)
        self._synchronized(stream)

    def synchronize_event(self, stream: Queue, mark: EventRecording) -> None:
        super().synchronize_event(stream, mark)
        self.clocks.synchronize(list(mark.known))

    def synchronize_device(self) -> None:
        super().synchronize_device()
        self.clocks.synchronize_all()

    def record(self, stream: Queue) -> EventRecording:
        mark = super().record(stream)
        mark.known = self.clocks.recorded(stream.id + 1)
        return mark

    def hold(self, stream: Queue, mark: EventRecording) -> None:
        super().hold(stream, mark)
        if self.capture is None:
            self.clocks.wait(stream.id + 1, list(mark.known))

    def behind(self, queue: Queue) -> None:
        super().behind(queue)
        self.clocks.wait(queue.id + 1, self.clocks.recorded(self.stream.id + 1))

    def carry(self, queue: Queue, duration: int, *, size: int, name: str) -> EventRecording:
        mark = super().carry(queue, duration, size=size, name=name)
        mark.known = self.clocks.recorded(queue.id + 1)
        return mark

    def land(self, landing: PeerEventRecording) -> None:
        super().land(landing)
        self.clocks.wait(self.stream.id + 1, list(landing.known))

    def host_knows(self) -> Sequence[int]:
        return self.clocks.recorded(self.clocks.host)

    def hear(self, known: Sequence[int]) -> None:
        self.clocks.synchronize(list(known))

    def reached(self, mark: EventRecording) -> bool:
        reached = super().reached(mark)
        if reached:
            self.clocks.synchronize(list(mark.known))
        return reached

    def idle(self, stream: Queue) -> bool:
        idle = super().idle(stream)
        if idle:
            self._synchronized(stream)
        return idle

    def _synchronized(self, stream: Queue) -> None:
        self.clocks.synchronize(self.clocks.recorded(stream.id + 1))
