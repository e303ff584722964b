"""Joins Kineto's rows with the run's log into a window of the timeline.

An operation has the correlation of the call that enqueued it, and the log says in which range and on which line that
call was made. All kernels of a replayed graph have the replay's correlation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import accumulate, pairwise

from ..record.timeline import Call, Op, Wait, Window
from ..vgpu.ledger import NO_CONTEXT, LedgerContext
from .kineto import API, GPU, STREAM_SYNC, SYNC, WAIT_EVENT, KinetoRow, call_kind, op_kind
from .log import NO_CALL, CallRecord, Log, StreamTable

NOWHERE = -1  # number of an unknown stream
OF_HOST = ("h2d", "d2h")  # whatever kind of memory the host's is
NO_WAIT = 5_000  # ns; a call shorter than this did not wait for the device
TOGETHER = 5_000  # ns; at most this lies between a copy and a sync of one call of torch's (an estimate)


@dataclass
class Joined:
    """The calls between two instants of the clock, and their operations, as ``window``; ``abstained`` says why it must
    not be counted. The calls that start and stop the trace lie outside, and are left out.

    ``rows`` are in order of time. ``threads`` are the numbers that Kineto may have for the scheduler's thread;
    ``epoch`` is the clock's; ``inline`` is the largest pageable source, in bytes, that the driver takes in the call.
    """

    rows: Sequence[KinetoRow]
    log: Log
    streams: StreamTable
    threads: frozenset[int]
    epoch: int
    inline: int
    _: KW_ONLY
    start: InitVar[int]
    end: InitVar[int]

    def __post_init__(self, start: int, end: int) -> None:
        begin, over = start + self.epoch, end + self.epoch
        calls = [row for row in self.rows if row.category in API]
        outside = {row.correlation for row in calls if not begin <= row.start < over}
        self.rows = [row for row in self.rows if row.correlation not in outside]
        self._own_calls = [row for row in self.rows if row.category in API and row.thread in self.threads]
        self._call_of = self._first(API)  # by correlation
        self._op_of = self._first(GPU)  # the first, where a graph has many
        self._sync_of = self._first((SYNC,))
        # Copies, by their and their sync's correlation.
        self._blocking = {
            row.correlation: copy for copy, sync in self._blocking_copies() for row in (copy, sync)
        }
        ops = list(self._ops())
        self.window = Window(
            start,
            max([end, *(op.end + 1 for op in ops)]),
            ranges=self.log.ranges,
            ops=ops,
            calls=[call for row in self._own_calls if (call := self._call(row)) is not None],
            waits=list(self._waits()),
            launched=self.log.launched,
            settled=self.log.settled,
        )
        self.abstained = _why_incomplete(self.window)

    def _ops(self) -> Iterator[Op]:
        for row in self.rows:
            if row.category in GPU and (op := self._op(row)) is not None:
                yield op

    def _waits(self) -> Iterator[Wait]:
        """When streams stood still for an event of another stream. A wait for an event whose record is unknown is left
        out.

        CUPTI records when the host asked for a wait. How long the stream waited follows from the operations around it::

            awaited stream    |--- last op before the record ---|
            waiting stream    |- last op before the wait -|     |- next
                                                          |wait |
        """
        epoch, finish = self.epoch, _Finish(self.rows, self._call_of)
        for row in self.rows:
            if row.category != SYNC or row.name != WAIT_EVENT:
                continue
            call, record = self._call_of.get(row.correlation), self._call_of.get(row.waits_for)
            if call is None or record is None:
                continue
            start = max(call.end, finish.before(row.stream, call.start))
            end = finish.before(row.source, record.start)
            if end > start:
                context, _ = self._logged(call)
                stream = self.streams.by_cupti(row.stream)
                yield Wait(stream, start - epoch, end - epoch, context.step)

    @property
    def notes(self) -> dict[str, int]:
        """Counts of rows, and of those without a place."""
        calls = sum(row.category in API for row in self.rows)
        gpu = [row for row in self.rows if row.category in GPU]
        return {
            "calls": calls,
            "calls_of_other_threads": calls - len(self._own_calls),
            "operations": len(gpu),
            "operations_without_call": sum(row.correlation not in self._call_of for row in gpu),
        }

    def _first(self, categories: Sequence[str]) -> dict[int, KinetoRow]:
        """Rows by correlation, if they have one; of several rows the earliest."""
        found = {row.correlation: row for row in reversed(self.rows) if row.category in categories}
        found.pop(-1, None)
        return found

    def _blocking_copies(self) -> Iterator[tuple[KinetoRow, KinetoRow]]:
        """Copies with the sync of the same call of torch's: its blocking copy makes these two calls."""
        calls = [row for row in self._own_calls if call_kind(row.name) is not None]
        for copy, then in pairwise(calls):
            if call_kind(copy.name) == "copy" and then.name == STREAM_SYNC:
                streams = {self._cupti_stream(copy), self._cupti_stream(then)} - {-1}
                if len(streams) <= 1 and self._same_call(copy, then):
                    yield copy, then

    def _same_call(self, copy: KinetoRow, then: KinetoRow) -> bool:
        """Whether one call of torch's made both. Where calls were not logged: whether they are in one range, and too
        close together for Python code in between."""
        (context, place), (later, next_place) = self._logged(copy), self._logged(then)
        if place != NO_CALL or next_place != NO_CALL:
            return place.call == next_place.call
        return context == later and then.start - copy.end <= TOGETHER

    def _op(self, row: KinetoRow) -> Op | None:
        what = op_kind(row)
        if what is None:
            return None
        kind, memory = what
        call = self._call_of.get(row.correlation)
        context, place = self._logged(call)
        epoch = self.epoch
        start = row.start - epoch
        return Op(
            kind=kind,
            name=row.name,
            stream=self.streams.by_cupti(row.stream),
            start=start,
            end=row.end - epoch,
            bytes=row.bytes,
            host_bytes=0,
            host_memory=memory,
            # As on the virtual GPU: torch made a sync, or the host waited in the call.
            blocking=kind in OF_HOST and (self._waits_inside(row) or row.correlation in self._blocking),
            range=context.range,
            forward=context.forward,
            step=context.step,
            site=place.site,
            # A short kernel may start before its launch returns; the device's clock may even show it before its call.
            launched=start if call is None else min(call.end, max(call.start, row.start)) - epoch,
        )

    def _call(self, row: KinetoRow) -> Call | None:
        kind = call_kind(row.name)
        if kind is None:
            return None
        context, place = self._logged(row)
        epoch, duration = self.epoch, row.end - row.start
        op = self._op_of.get(row.correlation, row)
        waits = duration >= NO_WAIT and (kind in ("sync", "memory") or self._waits_inside(op))
        return Call(
            kind="event" if kind == "memory" else kind,
            name=row.name,
            start=row.start - epoch,
            end=row.end - epoch,
            waited=duration if waits else 0,
            stream=self._stream(row, place),
            range=context.range,
            step=context.step,
            site=place.site,
        )

    def _logged(self, call: KinetoRow | None) -> tuple[LedgerContext, CallRecord]:
        """What the log has for the middle of a call of the scheduler's thread."""
        if call is None or call.thread not in self.threads:
            return NO_CONTEXT, NO_CALL
        middle = (call.start + call.end) // 2 - self.epoch
        return self.log.contexts.at(middle), self.log.calls.at(middle)

    def _waits_inside(self, row: KinetoRow) -> bool:
        """Whether the host waits for an operation inside the call that made it: for a copy by cudaMemcpy, which is not
        asynchronous, and for one of pageable memory that the driver does not take at once."""
        kind, memory = op_kind(row) or ("", "")
        call = self._call_of.get(row.correlation)
        synchronous = call is not None and call_kind(call.name) == "copy" and "Async" not in call.name
        staged = memory == "pageable" and (kind == "d2h" or row.bytes > self.inline)
        return kind in OF_HOST and (synchronous or staged)

    def _cupti_stream(self, call: KinetoRow) -> int:
        known = self._op_of.get(call.correlation) or self._sync_of.get(call.correlation)
        return -1 if known is None else known.stream

    def _stream(self, call: KinetoRow, place: CallRecord) -> int:
        """The stream of the call's operation, of its sync record, or of the copy that blocks by it; for an event, the
        stream that it was recorded on."""
        if place.stream >= 0:
            return place.stream
        cupti = self._cupti_stream(call)
        if cupti < 0 and (sync := self._sync_of.get(call.correlation)) is not None:
            cupti = sync.source
        if cupti < 0 and (copy := self._blocking.get(call.correlation)) is not None:
            cupti = self._cupti_stream(copy)
        return self.streams.by_cupti(cupti) if cupti >= 0 else NOWHERE


def _why_incomplete(window: Window) -> str | None:
    """Why a window is incomplete, if it is: CUPTI stops when its buffers are full, and may lack permission to start."""
    if not window.launched:
        return None
    if not window.ops:
        return "the trace has no GPU events: CUPTI gave none (permission?)"
    last = max(info.step for info in window.launched)
    if all(op.step != last for op in window.ops):
        reached = max(op.step for op in window.ops)
        return f"the trace is cut off: step {last} was launched, the last recorded operation is of step {reached}"
    return None


class _Finish:
    """When all operations that a stream had been given by some instant were done."""

    def __init__(self, rows: Sequence[KinetoRow], calls: Mapping[int, KinetoRow]) -> None:
        given: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for row in rows:
            if row.category in GPU and (call := calls.get(row.correlation)) is not None:
                given[row.stream].append((call.start, row.end))
        self._launched: dict[int, list[int]] = {}
        self._done: dict[int, list[int]] = {}
        for stream, pairs in given.items():
            pairs.sort()
            self._launched[stream] = [launched for launched, _ in pairs]
            self._done[stream] = list(accumulate((end for _, end in pairs), max))

    def before(self, stream: int, instant: int) -> int:
        """0 if the stream had been given no operation."""
        index = bisect_left(self._launched.get(stream, []), instant)
        return self._done[stream][index - 1] if index else 0
