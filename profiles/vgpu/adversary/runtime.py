"""The device's API for an adversary: only what the host waits for is done by the time that the wait returns."""

from __future__ import annotations

from ..engine import EventRecording, StreamQueue
from ..runtime import Runtime
from .order import DeferredOrder


class DeferredRuntime(Runtime):
    order: DeferredOrder

    def synchronize(self, stream: StreamQueue, *, site: int | None = None) -> None:
        super().synchronize(stream, site=site)
        self.order.finish(stream.id)

    def synchronize_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        super().synchronize_event(stream, recording)
        self.order.reach(recording)

    def synchronize_device(self) -> None:
        super().synchronize_device()
        self.order.finish_all()

    def record(self, stream: StreamQueue) -> EventRecording:
        recording = super().record(stream)
        if self.capture is None:
            self.order.record(stream.id, recording)
        return recording

    def wait_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        super().wait_event(stream, recording)
        if self.capture is None:
            self.order.wait(stream.id, recording)

    def reached(self, recording: EventRecording) -> bool:
        reached = super().reached(recording)
        if reached:
            self.order.reach(recording)
        return reached

    def idle(self, stream: StreamQueue) -> bool:
        idle = super().idle(stream)
        if idle:
            self.order.finish(stream.id)
        return idle

    def flush(self) -> None:
        self.order.finish_all()
        super().flush()
