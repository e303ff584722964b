"""Streams and engines as discrete events, simulated lazily.

A launch only appends to a stream's queue; an operation's start is fixed once the host's clock passes it, or while the
host waits. This is exact: a later launch is ready no earlier than the host's clock, so it cannot displace an operation
that starts before, and while the host waits there are no launches.

Time is in integer nanoseconds. The simulation is independent of tensors and calls, and does not interpret rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

COMPUTE, H2D, D2H, BESIDE, LINK = range(5)
FOREVER = 1 << 62
QUEUES = 32  # of one rank; more than any rank has
PENDING = 256  # operations left unsettled before a launch settles what the clock has passed

Row = tuple[Any, ...]
Served = tuple[Row, int, int]  # with start and end
Instants = NDArray[np.int64]


class EventRecording:
    """One recording of an event: the time at which its stream reached it, or None while that is not known.

    ``clock`` is the vector clock of the recording; empty unless hazards are checked.
    """

    clock: Sequence[int] = ()
    time: int | None = None


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


class Replay:
    """A run of a graph's kernels as one operation, with ``gap`` between two of them. ``index`` is the next kernel to
    start, and ``begin`` its instant. ``rows`` has one row per kernel, or is empty if the run is reported as a whole, by
    ``row``.

    ``begins()`` [count + 1] are the instants at which the kernels start, from the start of the first, and the end of
    the last one and a gap. They are computed once, when the run is first interrupted.
    """

    __slots__ = ("_begins", "_compute", "begin", "count", "gap", "index", "row", "rows", "start")

    def __init__(
        self, begins: Callable[[], Instants], count: int, gap: int, row: Row, rows: Sequence[Row] = ()
    ) -> None:
        self._compute = begins
        self._begins: Instants | None = None
        self.count = count
        self.gap = gap
        self.row = row
        self.rows = rows
        self.index = self.begin = self.start = 0

    def begins(self) -> Instants:
        if self._begins is None:
            self._begins = self._compute()
        return self._begins


# What a queue holds are tuples, since a step makes many:
#
#     operation    (engine, time of the launch, serial, duration, row or Replay)
#     recording    (_RECORD, time of the call, EventRecording)
#     wait         (_WAIT, EventTime)
Entry = tuple[Any, ...]
_RECORD, _WAIT = -2, -1  # engines are numbered from 0


class StreamQueue:
    """A stream: its entries, the end of its last operation (``tail``) and the earliest start of the next one."""

    __slots__ = ("id", "items", "partition", "ready", "ready_before_wait", "share", "tail")

    def __init__(self, id: int, *, share: float = 1.0, partition: int = COMPUTE) -> None:
        self.id = id
        self.share = share  # of the multiprocessors
        self.partition = partition  # the engine of its kernels
        self.items: deque[Entry] = deque()
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
        """Remove the recordings and the ended waits at the head; returns whether there was a recording, which may end
        other queues' waits."""
        items, recorded = self.items, False
        while items:
            head = items[0]
            if head[0] == _RECORD:
                _, launched, recording = head
                recording.time = launched if launched > self.tail else self.tail
                recorded = True
            elif head[0] == _WAIT and (time := head[1].time) is not None:
                self.delay_until(time)
            else:
                break
            items.popleft()
        return recorded


# Start, ready, the launch's serial, queue: ordered by the first three, which differ between launches.
_Candidate = tuple[int, int, int, StreamQueue]


def _peers_awaited(queues: Sequence[StreamQueue]) -> list[PeerEventRecording]:
    """The recordings of other devices for which queues wait."""
    waits = [queue.items[0][1] for queue in queues if queue.items and queue.items[0][0] == _WAIT]
    return [awaited for awaited in waits if isinstance(awaited, PeerEventRecording)]


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

    def queue(self, *, share: float = 1.0, partition: int = COMPUTE) -> StreamQueue:
        queue = StreamQueue(self.first + len(self._queues), share=share, partition=partition)
        self._queues.append(queue)
        return queue

    def partition(self, share: float) -> StreamQueue:
        """A queue whose kernels run on a share of the multiprocessors, beside those of other partitions."""
        self._free.append(0)
        return self.queue(share=share, partition=len(self._free) - 1)

    def renumber_partition(self, queue: int, number: int) -> None:
        """Give the queue ``number``, if it is a partition's."""
        renumbered = self._queues[queue - self.first]
        if renumbered.partition != COMPUTE:
            renumbered.id = number

    def submit(self, queue: StreamQueue, engine: int, now: int, duration: int, row: Row | Replay) -> None:
        """Enqueue an operation at the host's time ``now``."""
        free, items = self._free, queue.items
        at_once = not self.pending and queue.ready <= now and free[engine] <= now and not items
        if at_once and not isinstance(row, Replay):
            queue.ready_before_wait = None
            free[engine] = queue.tail = end = now + duration
            queue.ready = end + self._gap if engine == COMPUTE else end
            self.served.append((row, now, end))
            return
        self._serial += 1
        items.append((engine, now, self._serial, duration, row))
        self._cached_next = None
        self.pending += 1
        if self.pending > self._bound:
            self.settle(now)
            self._bound = self.pending + PENDING

    def record(self, queue: StreamQueue, now: int, recording: EventRecording | None = None) -> EventRecording:
        """Make a recording on the queue, or complete one that was begun."""
        recording = recording or EventRecording()
        if queue.items:
            queue.items.append((_RECORD, now, recording))
        else:
            tail = queue.tail
            recording.time = tail if tail > now else now
        return recording

    def wait_event(self, queue: StreamQueue, recording: EventTime) -> None:
        """Later entries of the queue start no earlier than the recording."""
        time = recording.time
        if time is not None and not queue.items:
            queue.delay_until(time)
        else:
            queue.items.append((_WAIT, recording))
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
            first, _ = self._first()
            cached = NextStart(None if first is None else first[0], _peers_awaited(self._queues))
            self._cached_next = cached
        return cached

    def run(self, horizon: int, until: EventTime | None = None, *, alone: bool = False) -> None:
        """Serve the operations that start no later than the horizon; stop when the time of ``until`` is known, or,
        ``alone``, when a queue waits for another device."""
        self._cached_next = None
        while True:
            first, rival = self._first()
            if first is None or first[0] > horizon or (until is not None and until.time is not None):
                return
            if alone and _peers_awaited(self._queues):
                return
            self._serve(first, rival, horizon)

    def _first(self) -> tuple[_Candidate | None, int]:
        """The operation that starts first, after all markers that can be removed are removed; None if nothing is
        enqueued or all queues are blocked. An engine that becomes free takes the candidate with the lowest (ready,
        serial). Returns also the earliest start in the other queues."""
        free = self._free
        while True:
            best, rival, blocked, released = None, FOREVER, False, False
            for queue in self._queues:
                items = queue.items
                if not items:
                    continue
                head = items[0]
                if head[0] < 0:
                    if head[0] == _RECORD or head[1].time is not None:
                        # A recording may release a queue that was looked at before.
                        released |= queue.settle_markers() and blocked
                    if not items or items[0][0] < 0:
                        blocked = True
                        continue
                    head = items[0]
                engine, ready, serial, _, _ = head
                if queue.ready > ready:
                    ready = queue.ready
                start = free[engine]
                candidate = (start if start > ready else ready, ready, serial, queue)
                if best is None:
                    best = candidate
                elif candidate < best:
                    best, rival = candidate, best[0]
                elif candidate[0] < rival:
                    rival = candidate[0]
            if not released:
                return best, rival

    def _serve(self, first: _Candidate, rival: int, horizon: int) -> None:
        """Serve the operation that starts first, of a replay at least one kernel, and those behind it on its queue that
        start before the ``rival``: an operation of another queue starts no earlier than it would now."""
        start, _, _, queue = first
        items, free, served, gap = queue.items, self._free, self.served, self._gap
        if queue.ready_before_wait is not None:
            self._note_wait(queue, items[0])
        while True:
            engine, _, serial, duration, row = items[0]
            end = start + duration
            if type(row) is not Replay:
                served.append((row, start, end))
            else:
                limit = self._undisturbed(queue, serial, horizon)
                last_end = self._serve_replay(queue, row, start, duration, limit)
                if last_end is None:
                    return
                end = last_end
            free[engine] = queue.tail = end
            queue.ready = start = end + gap if engine == COMPUTE else end
            items.popleft()
            self.pending -= 1
            if not items:
                return
            head = items[0]
            if head[0] < 0:
                queue.settle_markers()
                return
            if head[1] > start:
                start = head[1]
            if free[head[0]] > start:
                start = free[head[0]]
            if start >= rival or start > horizon:
                return

    def _undisturbed(self, queue: StreamQueue, serial: int, horizon: int) -> int:
        """The time up to which the kernels of the queue's replay begin before another queue's head, or a kernel that is
        released by it at once, has to be considered."""
        limit = horizon
        for other in self._queues:
            if other is queue or not other.items or other.items[0][0] < 0:
                continue
            engine, launched, other_serial, _, _ = other.items[0]
            start = max(other.ready, launched, 0 if engine == COMPUTE else self._free[engine])
            limit = min(limit, start if other_serial > serial else start - 1)
        return limit

    def _serve_replay(
        self, queue: StreamQueue, replay: Replay, start: int, duration: int, limit: int
    ) -> int | None:
        """Serve the next kernel and all later ones that begin no later than the limit. Returns the end of the replay,
        or None if kernels are left. ``duration`` is that of a replay which is not interrupted."""
        if not replay.index:
            replay.start = start
        origin = start - replay.begin
        end = origin + duration
        if replay.rows or end > limit:
            first, begins, count = replay.index, replay.begins(), replay.count
            last = min(max(int(begins.searchsorted(limit - origin, "right")), first + 1), count)
            if replay.rows:
                bounds = (origin + begins[first : last + 1]).tolist()
                ends = [bound - replay.gap for bound in bounds[1:]]
                self.served.extend(zip(replay.rows[first:last], bounds[:-1], ends, strict=True))
            if last < count:
                replay.index, replay.begin = last, int(begins[last])
                queue.ready = ready = origin + replay.begin
                self._free[COMPUTE] = queue.tail = ready - replay.gap
                return None
        if not replay.rows:
            self.served.append((replay.row, replay.start, end))
        return end

    def _note_wait(self, queue: StreamQueue, operation: Entry) -> None:
        """The operation, the next one of the queue, is ready only behind a wait."""
        _, launched, _, _, row = operation
        since, queue.ready_before_wait = queue.ready_before_wait, None
        assert since is not None
        begin = max(since, launched)
        if begin < queue.ready:
            held = row.row if isinstance(row, Replay) else row
            self.waits.append(QueueWait(queue.id, begin, queue.ready, held))
