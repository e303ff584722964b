"""Streams and engines as discrete events, simulated lazily.

A launch only appends to a stream's queue; an operation's start is fixed once the host's clock passes it, or while the
host waits. This is exact: a later launch is ready no earlier than the host's clock, so it cannot displace an operation
that starts before, and while the host waits there are no launches.

Time is in integer nanoseconds. The simulation is independent of tensors and calls, and does not interpret rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

COMPUTE, H2D, D2H, BESIDE, LINK = range(5)
FOREVER = 1 << 62
QUEUES = 32  # of one rank; more than any rank has
PENDING = 256  # operations left unsettled before a launch settles what the clock has passed

Row = tuple[Any, ...]
Served = tuple[Row, int, int]  # with start and end
Times = np.ndarray[Any, np.dtype[np.int64]]


class EventRecording:
    """One recording of an event: the time at which its stream reached it, or None while that is not known.

    ``clock`` is the vector clock of the recording; empty unless hazards are checked.
    """

    __slots__ = ("clock", "time")

    def __init__(self) -> None:
        self.clock: Sequence[int] = ()
        self.time: int | None = None


class PeerEventRecording:
    """Another device's recording, which takes effect on this device a link's latency later."""

    def __init__(self, recording: EventRecording, latency: int) -> None:
        self.recording = recording
        self._latency = latency

    def delayed(self, time: int) -> PeerEventRecording:
        """The same recording over a link whose latency is ``time`` longer."""
        return PeerEventRecording(self.recording, self._latency + time)

    @property
    def clock(self) -> Sequence[int]:
        return self.recording.clock

    @property
    def time(self) -> int | None:
        return None if self.recording.time is None else self.recording.time + self._latency


class EventTime(Protocol):
    """An event's time, or None while it is not known."""

    @property
    def time(self) -> int | None: ...


class QueueWait(NamedTuple):
    """A queue waited for another queue's recording before it could start the operation ``row``."""

    queue: int
    start: int
    end: int
    row: Row


@dataclass(slots=True, eq=False)
class LaunchEntry:
    """An operation in a queue."""

    engine: int
    serial: int
    launched: int
    duration: int
    row: Row


@dataclass(slots=True, eq=False)
class ReplayEntry(LaunchEntry):
    """A run of a graph's kernels as one operation. Node k takes ``times[k]``, with ``gap`` between two nodes; ``index``
    is the next node to start. ``rows`` has one row per node, or is empty if the run is reported as a whole.
    """

    times: Times
    gap: int
    rows: Sequence[Row] = ()
    index: int = 0
    start: int = 0
    _begins: Times | None = None

    @property
    def begins(self) -> Times:
        """From the start of the first node to that of each."""
        if self._begins is None:
            spaced = self.times + self.gap
            self._begins = spaced.cumsum() - spaced
        return self._begins


@dataclass(slots=True, eq=False)
class RecordEntry:
    recording: EventRecording
    launched: int


@dataclass(slots=True, eq=False)
class WaitEntry:
    recording: EventTime


class StreamQueue:
    """A stream: its entries, the end of its last operation (``tail``) and the earliest start of the next one."""

    __slots__ = ("id", "items", "partition", "ready", "ready_before_wait", "share", "tail")

    def __init__(self, id: int, *, share: float = 1.0, partition: int = COMPUTE) -> None:
        self.id = id
        self.share = share  # of the multiprocessors
        self.partition = partition  # the engine of its kernels
        self.items: deque[LaunchEntry | RecordEntry | WaitEntry] = deque()
        self.tail = 0
        self.ready = 0  # tail plus the gap between kernels, or the time of a recording that it waited for
        self.ready_before_wait: int | None = None  # the value of ready before a wait raised it

    def delay_until(self, time: int) -> None:
        if time > self.ready:
            if self.ready_before_wait is None:
                self.ready_before_wait = self.ready
            self.ready = time
        self.tail = max(self.tail, time)

    def settle_markers(self) -> bool:
        """Remove the recordings and the ended waits at the head; returns whether there were any."""
        items, moved = self.items, False
        while items:
            head = items[0]
            if isinstance(head, LaunchEntry):
                break
            if isinstance(head, RecordEntry):
                head.recording.time = max(self.tail, head.launched)
            else:
                time = head.recording.time
                if time is None:
                    break
                self.delay_until(time)
            items.popleft()
            moved = True
        return moved


# Start, ready, the launch's serial, queue, launch: ordered by the first three, which differ between launches.
_Candidate = tuple[int, int, int, StreamQueue, LaunchEntry]


def _peers_awaited(busy: Sequence[StreamQueue]) -> list[PeerEventRecording]:
    """The recordings of other devices for which queues wait."""
    return [
        head.recording
        for queue in busy
        if isinstance(head := queue.items[0], WaitEntry) and isinstance(head.recording, PeerEventRecording)
    ]


class NextStart(NamedTuple):
    """When the device's next operation starts, None if nothing is enqueued or all queues are blocked. ``waits``: the
    recordings of other devices that block its queues."""

    start: int | None
    waits: list[PeerEventRecording]


class Simulation:
    """The device's queues and engines. ``gap`` separates two kernels of one queue; ``first`` is the number of the first
    queue, which differs between devices that exchange data."""

    def __init__(self, *, gap: int, first: int = 0) -> None:
        self.first = first
        self.served: list[Served] = []
        self.waits: list[QueueWait] = []
        self.pending = 0
        self._gap = gap
        self._free = [0] * 5
        self._queues: list[StreamQueue] = []
        self._serial = 0
        self._bound = PENDING
        self._cached_next: NextStart | None = None  # None if it has to be determined again

    def queue(self) -> StreamQueue:
        queue = StreamQueue(self.first + len(self._queues))
        self._queues.append(queue)
        return queue

    def partition(self, share: float) -> StreamQueue:
        """A queue whose kernels run on a share of the multiprocessors, beside those of other partitions."""
        self._free.append(0)
        queue = StreamQueue(self.first + len(self._queues), share=share, partition=len(self._free) - 1)
        self._queues.append(queue)
        return queue

    def renumber_partition(self, queue: int, number: int) -> None:
        """Give the queue ``number``, if it is a partition's."""
        renumbered = self._queues[queue - self.first]
        if renumbered.partition != COMPUTE:
            renumbered.id = number

    def submit(self, queue: StreamQueue, engine: int, *, now: int, duration: int, row: Row) -> None:
        """Enqueue an operation at the host's time ``now``."""
        free = self._free
        if not self.pending and queue.ready <= now and free[engine] <= now and not queue.items:
            queue.ready_before_wait = None
            free[engine] = queue.tail = end = now + duration
            queue.ready = end + self._gap if engine == COMPUTE else end
            self.served.append((row, now, end))
            return
        self._serial += 1
        self._enqueue(queue, LaunchEntry(engine, self._serial, now, duration, row), now)

    def submit_replay(
        self,
        queue: StreamQueue,
        *,
        now: int,
        times: Times,
        gap: int,
        row: Row,
        rows: Sequence[Row] = (),
    ) -> None:
        """Enqueue a run of a graph's kernels at the host's time ``now``; ``times`` of the kernels, with ``gap`` between
        two of them."""
        self._serial += 1
        duration = int(times.sum()) + gap * (len(times) - 1)
        replay = ReplayEntry(COMPUTE, self._serial, now, duration, row, times, gap, rows)
        self._enqueue(queue, replay, now)

    def record(self, queue: StreamQueue, now: int, recording: EventRecording | None = None) -> EventRecording:
        """Make a recording on the queue, or complete one that was begun."""
        recording = recording or EventRecording()
        if queue.items:
            queue.items.append(RecordEntry(recording, now))
        else:
            recording.time = max(queue.tail, now)
        return recording

    def wait_event(self, queue: StreamQueue, recording: EventTime) -> None:
        """Later entries of the queue start no earlier than the recording."""
        time = recording.time
        if time is not None and not queue.items:
            queue.delay_until(time)
        else:
            queue.items.append(WaitEntry(recording))
            self._cached_next = None

    def wait(self, recording: EventRecording) -> int:
        """The recording's time, at which the waiting host continues."""
        if recording.time is None:
            self.run(FOREVER, until=recording)
        assert recording.time is not None, "an event is recorded before the host can wait for the recording"
        return recording.time

    def drain(self) -> int:
        """Serve everything; returns the time at which the device becomes idle."""
        self.run(FOREVER)
        return max((queue.tail for queue in self._queues), default=0)

    def settle(self, now: int) -> None:
        """Bring the device up to the host's clock."""
        self.run(now)

    def head(self) -> NextStart:
        """Valid until this device changes, or another device reaches a recording that blocks a queue."""
        cached = self._cached_next
        if cached is None or (cached.waits and any(peer.time is not None for peer in cached.waits)):
            busy = self._settled()
            first, waits = self._first(busy), _peers_awaited(busy)
            cached = self._cached_next = NextStart(None if first is None else first[0], waits)
        return cached

    def run(self, horizon: int, until: EventTime | None = None, *, alone: bool = False) -> None:
        """Serve the operations that start no later than the horizon; stop when the time of ``until`` is known, or,
        ``alone``, when a queue waits for another device."""
        self._cached_next = None
        while True:
            busy = self._settled()
            if not busy or (until is not None and until.time is not None):
                return
            if alone and _peers_awaited(busy):
                return
            if len(busy) == 1:
                self._drain(busy[0], horizon, until)
                return
            served = self._serve_first(busy, horizon)
            while served is not None and served.items and isinstance(served.items[0], LaunchEntry):
                served = self._serve_first(busy, horizon)
            if served is None:
                return

    def _enqueue(self, queue: StreamQueue, launch: LaunchEntry, now: int) -> None:
        queue.items.append(launch)
        self._cached_next = None
        self.pending += 1
        if self.pending > self._bound:
            self.settle(now)
            self._bound = self.pending + PENDING

    def _settled(self) -> list[StreamQueue]:
        """The queues that have entries after all markers that can be removed are removed."""
        busy = [queue for queue in self._queues if queue.items]
        moved = True
        while moved:
            moved = False
            for queue in busy:
                if queue.items and not isinstance(queue.items[0], LaunchEntry):
                    moved |= queue.settle_markers()
        return [queue for queue in busy if queue.items]

    def _drain(self, queue: StreamQueue, horizon: int, until: EventTime | None) -> None:
        """``run`` for the only queue that has entries, whose operations no other queue can displace."""
        items = queue.items
        while items:
            head = items[0]
            if not isinstance(head, LaunchEntry):
                moved = queue.settle_markers()
                if not moved or (until is not None and until.time is not None):
                    return
                continue
            start = max(self._free[head.engine], queue.ready, head.launched)
            if start > horizon:
                return
            self._serve(queue, head, start, horizon)

    def _serve_first(self, busy: Sequence[StreamQueue], horizon: int) -> StreamQueue | None:
        """Serve the operation that starts first, and return its queue; None if it starts after the horizon or all
        queues are blocked."""
        first = self._first(busy)
        if first is None or first[0] > horizon:
            return None
        start, _, _, chosen, launch = first
        limit = horizon
        if isinstance(launch, ReplayEntry):
            contenders = [
                (max(queue.ready, head.launched), head)
                for queue in busy
                if isinstance(head := queue.items[0], LaunchEntry)
            ]
            limit = self._undisturbed(launch, horizon, contenders)
        self._serve(chosen, launch, start, limit)
        return chosen

    def _first(self, busy: Sequence[StreamQueue]) -> _Candidate | None:
        """The operation that starts first; None if all queues are blocked. An engine that becomes free takes the
        candidate with the lowest (ready, serial)."""
        best: _Candidate | None = None
        free = self._free
        for queue in busy:
            head = queue.items[0]
            if isinstance(head, LaunchEntry):
                ready = max(queue.ready, head.launched)
                candidate = (max(free[head.engine], ready), ready, head.serial, queue, head)
                if best is None or candidate < best:
                    best = candidate
        return best

    def _undisturbed(
        self, replay: ReplayEntry, horizon: int, contenders: Sequence[tuple[int, LaunchEntry]]
    ) -> int:
        """The time up to which the replay's nodes begin before another queue's head, or a kernel that is released by it
        at once, has to be considered."""
        limit = horizon
        for ready, launch in contenders:
            if launch is not replay:
                start = ready if launch.engine == COMPUTE else max(ready, self._free[launch.engine])
                limit = min(limit, start if launch.serial > replay.serial else start - 1)
        return limit

    def _serve(self, queue: StreamQueue, launch: LaunchEntry, start: int, limit: int) -> None:
        if queue.ready_before_wait is not None:
            self._note_wait(queue, launch)
        if isinstance(launch, ReplayEntry):
            self._serve_nodes(queue, launch, start, limit)
            return
        self._finish(queue, launch.engine, start + launch.duration)
        self.served.append((launch.row, start, queue.tail))

    def _finish(self, queue: StreamQueue, engine: int, end: int) -> None:
        self._free[engine] = queue.tail = end
        queue.ready = end + self._gap if engine == COMPUTE else end
        queue.items.popleft()
        self.pending -= 1

    def _serve_nodes(self, queue: StreamQueue, replay: ReplayEntry, start: int, limit: int) -> None:
        """Serve the next node and all later ones that begin no later than the limit."""
        end: int | None = start + replay.duration
        if not replay.index:
            replay.start = start
        if replay.index or replay.rows or start + replay.duration - int(replay.times[-1]) > limit:
            end = self._serve_some_nodes(queue, replay, start, limit)
        if end is not None:
            self._finish(queue, COMPUTE, end)
            if not replay.rows:
                self.served.append((replay.row, replay.start, end))

    def _serve_some_nodes(
        self, queue: StreamQueue, replay: ReplayEntry, start: int, limit: int
    ) -> int | None:
        """Returns the end of the replay, or None if nodes are left."""
        first, begins, times = replay.index, replay.begins, replay.times
        origin = start - int(begins[first])
        last = len(begins)
        if begins[-1] > limit - origin:
            last = max(first + 1, int(begins.searchsorted(limit - origin, side="right")))
        for k in range(first, last) if replay.rows else ():
            begin = origin + int(begins[k])
            self.served.append((replay.rows[k], begin, begin + int(times[k])))
        end, replay.index = origin + int(begins[last - 1] + times[last - 1]), last
        if last == len(begins):
            return end
        self._free[COMPUTE] = queue.tail = end
        queue.ready = origin + int(begins[last])
        return None

    def _note_wait(self, queue: StreamQueue, launch: LaunchEntry) -> None:
        since, queue.ready_before_wait = queue.ready_before_wait, None
        assert since is not None
        begin = max(since, launch.launched)
        if begin < queue.ready:
            self.waits.append(QueueWait(queue.id, begin, queue.ready, launch.row))
