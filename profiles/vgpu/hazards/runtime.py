"""The device's API as a checker hears it: which call orders what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine import EventRecording, PeerEventRecording, Simulation, StreamQueue
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

    def synchronize(self, stream: StreamQueue, *, site: int | None = None) -> None:
        super().synchronize(stream, site=site)
        self._synchronized(stream)

    def synchronize_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        super().synchronize_event(stream, recording)
        self.clocks.synchronize(list(recording.clock))

    def synchronize_device(self) -> None:
        super().synchronize_device()
        self.clocks.synchronize_all()

    def record(self, stream: StreamQueue) -> EventRecording:
        recording = super().record(stream)
        recording.clock = self.clocks.recorded(stream.id + 1)
        return recording

    def wait_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        super().wait_event(stream, recording)
        if self.capture is None:
            self.clocks.wait(stream.id + 1, list(recording.clock))

    def order_after_current(self, queue: StreamQueue) -> None:
        super().order_after_current(queue)
        self.clocks.wait(queue.id + 1, self.clocks.recorded(self.stream.id + 1))

    def send(self, queue: StreamQueue, duration: int, *, size: int, name: str) -> EventRecording:
        recording = super().send(queue, duration, size=size, name=name)
        recording.clock = self.clocks.recorded(queue.id + 1)
        return recording

    def wait_peer_event(self, recording: PeerEventRecording) -> None:
        super().wait_peer_event(recording)
        self.clocks.wait(self.stream.id + 1, list(recording.clock))

    def host_clock(self) -> Sequence[int]:
        return self.clocks.recorded(self.clocks.host)

    def join_host_clock(self, clock: Sequence[int]) -> None:
        self.clocks.synchronize(list(clock))

    def reached(self, recording: EventRecording) -> bool:
        reached = super().reached(recording)
        if reached:
            self.clocks.synchronize(list(recording.clock))
        return reached

    def idle(self, stream: StreamQueue) -> bool:
        idle = super().idle(stream)
        if idle:
            self._synchronized(stream)
        return idle

    def _synchronized(self, stream: StreamQueue) -> None:
        self.clocks.synchronize(self.clocks.recorded(stream.id + 1))
