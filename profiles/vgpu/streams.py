"""Streams and events with the methods of torch.cuda's streams and events."""

from __future__ import annotations

from typing import Any

import torch

from .device import CURRENT, device
from .engine import EventRecording, StreamQueue
from .runtime import GraphCaptureError


class Stream:
    """A queue of the device. ``priority`` is accepted and has no effect."""

    def __init__(self, device: Any = None, priority: int = 0, *, queue: StreamQueue | None = None) -> None:  # noqa: ARG002
        gpu = CURRENT.get()
        if queue is None and not gpu.capabilities.side_streams:
            raise RuntimeError("this device has one queue: side streams are not available")
        self.queue = queue or gpu.runtime.simulation.queue()
        self.priority = priority

    @property
    def device(self) -> torch.device:
        return device()

    @property
    def stream_id(self) -> int:
        return self.queue.id

    cuda_stream = stream_id  # the name of the handle on CUDA
    device_index = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, -1

    def __enter__(self) -> Stream:
        self._outer = [*getattr(self, "_outer", []), CURRENT.get().runtime.stream]
        CURRENT.get().runtime.stream = self.queue
        return self

    def __exit__(self, *raised: object) -> None:
        CURRENT.get().runtime.stream = self._outer.pop()

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        CURRENT.get().runtime.synchronize(self.queue)

    def query(self) -> bool:
        """Whether everything enqueued so far has ended."""
        return CURRENT.get().runtime.query(self.queue)

    def is_capturing(self) -> bool:
        return CURRENT.get().runtime.capture is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return id(self.queue)

    def __repr__(self) -> str:
        return f"Stream(id={self.queue.id})"


class GreenContext:
    """A share of the GPU's multiprocessors, as ``torch.cuda.green_contexts.GreenContext``."""

    def __init__(self, share: float) -> None:
        self._share = share

    @classmethod
    def create(cls, *, num_sms: int) -> GreenContext:
        available = CURRENT.get().runtime.multiprocessors
        if num_sms > available:
            raise RuntimeError(f"this device has {available} multiprocessors, not {num_sms}")
        return cls(num_sms / available)

    def Stream(self) -> Stream:  # noqa: N802 (torch's name)
        return Stream(queue=CURRENT.get().runtime.simulation.partition(self._share))


class Event:
    """A point in a stream. A wait for an event that was never recorded has no effect, as on CUDA."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,  # noqa: ARG002 - how CUDA's host waits, without effect here
        interprocess: bool = False,  # noqa: ARG002
        external: bool = False,
    ) -> None:
        """``external``: a graph under capture records the event anew whenever it is replayed."""
        if not CURRENT.get().capabilities.events:
            raise RuntimeError("this device has one queue: events are not available")
        self._timed, self._external = enable_timing, external
        self._recording: EventRecording | None = None

    device = Stream.device

    def record(self, stream: Stream | None = None) -> None:
        runtime = CURRENT.get().runtime
        queue = stream.queue if stream else runtime.stream
        if self._external and runtime.capture is not None:
            runtime.capture.mark(self._recorded)
            CURRENT.get().watcher.marked()
        else:
            self._recorded(queue, runtime.record(queue))

    def _recorded(self, queue: StreamQueue, recording: EventRecording) -> None:
        self._queue, self._recording = queue, recording

    def wait(self, stream: Stream | None = None) -> None:
        runtime = CURRENT.get().runtime
        if self._external and runtime.capture is not None:
            raise GraphCaptureError("a wait for an external event cannot be captured on this device")
        if self._recording is not None:
            runtime.wait_event(stream.queue if stream else runtime.stream, self._recording)

    def query(self) -> bool:
        return self._recording is None or CURRENT.get().runtime.query(self._queue, self._recording)

    def synchronize(self) -> None:
        if self._recording is not None:
            CURRENT.get().runtime.synchronize_event(self._queue, self._recording)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``; both were made with enable_timing and have been reached."""
        if not (self._timed and end._timed):
            raise ValueError("both events must be created with enable_timing=True")
        if not (self.query() and end.query()):
            raise RuntimeError("both events must be completed before calculating elapsed time")
        first, last = self._recording, end._recording
        assert first and last and first.time is not None and last.time is not None
        return (last.time - first.time) / 1e6


class StreamContext:
    """Makes a stream the current one for a block; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        runtime = CURRENT.get().runtime
        self._before = runtime.stream
        if self._stream is not None:
            runtime.stream = self._stream.queue

    def __exit__(self, *raised: object) -> None:
        CURRENT.get().runtime.stream = self._before
