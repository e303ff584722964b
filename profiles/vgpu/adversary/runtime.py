"""The device's API as an adversary hears it: what the host waits for has to be done by then, and nothing else."""

from __future__ import annotations

from ..engine import EventRecording, Queue
from ..runtime import Runtime
from .order import DeferredOrder


class DeferredRuntime(Runtime):
    order: DeferredOrder

    def synchronize(self, stream: Queue, *, site: int | None = None) -> None:
        super().synchronize(stream, site=site)
        self.order.finish(stream.id)

    def synchronize_event(self, stream: Queue, mark: EventRecording) -> None:
        super().synchronize_event(stream, mark)
        self.order.reach(mark)

    def synchronize_device(self) -> None:
        super().synchronize_device()
        self.order.finish_all()

    def record(self, stream: Queue) -> EventRecording:
        mark = super().record(stream)
        if self.capture is None:
            self.order.record(stream.id, mark)
        return mark

    def hold(self, stream: Queue, mark: EventRecording) -> None:
        super().hold(stream, mark)
        if self.capture is None:
            self.order.wait(stream.id, mark)

    def reached(self, mark: EventRecording) -> bool:
        reached = super().reached(mark)
        if reached:
            self.order.reach(mark)
        return reached

    def idle(self, stream: Queue) -> bool:
        idle = super().idle(stream)
        if idle:
            self.order.finish(stream.id)
        return idle

    def flush(self) -> None:
        self.order.finish_all()
        super().flush()
