"""What every stream has yet to do, and when it does it: as late as allowed, but for whoever is in a hurry.

Work of one stream is done in the order in which it was enqueued; a wait holds its stream's head until the event's
own stream has reached the recording. Nothing else orders anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from ..engine import EventRecording

Work = Callable[[], object]


class DeferredTask(NamedTuple):
    """Something to compute; ``said`` tells what it is and where it was launched."""

    work: Work
    said: Callable[[], str]


class DeferredRecord(NamedTuple):
    recording: EventRecording


class DeferredWait(NamedTuple):
    recording: EventRecording


Item = DeferredTask | DeferredRecord | DeferredWait


class OrderStrategy(Protocol):
    """Which of the streams that could go on goes on now, of its own accord."""

    def choose(self, ready: Iterator[int]) -> int | None: ...


class DeferredOrder:
    def __init__(self, temper: OrderStrategy) -> None:
        self._temper = temper
        self._queues: dict[int, deque[Item]] = {}
        self._pending: dict[
            EventRecording, int
        ] = {}  # recordings that their stream has not reached, with that stream

    @property
    def idle(self) -> bool:
        return not any(self._queues.values())

    # ---- enqueueing ----------------------------------------------------------------------------------------

    def launch(self, stream: int, task: DeferredTask) -> None:
        self._enqueue(stream, task)

    def record(self, stream: int, recording: EventRecording) -> None:
        if self._queues.get(stream):
            self._pending[recording] = stream
            self._enqueue(stream, DeferredRecord(recording))

    def wait(self, stream: int, recording: EventRecording) -> None:
        if recording in self._pending and self._pending[recording] != stream:
            self._enqueue(stream, DeferredWait(recording))

    def _enqueue(self, stream: int, item: Item) -> None:
        self._queues.setdefault(stream, deque()).append(item)
        self._hurry()

    # ---- the host waits ------------------------------------------------------------------------------------

    def finish(self, stream: int) -> None:
        """Everything that the stream has been given, and whatever that waits for."""
        queue = self._queues.get(stream)
        while queue:
            self._step(stream)

    def finish_all(self) -> None:
        while not self.idle:
            for stream in list(self._queues):
                self.finish(stream)

    def reach(self, recording: EventRecording) -> None:
        """The recording's stream up to the recording."""
        while recording in self._pending:
            self._step(self._pending[recording])

    def _step(self, stream: int) -> None:
        """What the stream's next item waits for, or that item; then whoever is in a hurry."""
        queue = self._queues[stream]
        head = queue[0]
        if isinstance(head, DeferredWait) and head.recording in self._pending:
            self._step(self._pending[head.recording])
            return
        self._do(queue.popleft())
        self._hurry()

    # ---- of its own accord ---------------------------------------------------------------------------------

    def _hurry(self) -> None:
        while (stream := self._temper.choose(self._ready())) is not None:
            self._do(self._queues[stream].popleft())

    def _ready(self) -> Iterator[int]:
        """Streams whose next item waits for nothing."""
        for stream, queue in self._queues.items():
            if queue and not (isinstance(queue[0], DeferredWait) and queue[0].recording in self._pending):
                yield stream

    def _do(self, item: Item) -> None:
        if isinstance(item, DeferredRecord):
            del self._pending[item.recording]
        elif isinstance(item, DeferredTask):
            try:
                item.work()
            except Exception as error:
                error.add_note(f"in {item.said()}, done late")
                raise
