"""From Kineto's rows and the run's log to a window of the timeline.

Every operation has the correlation of the call that enqueued it, and that call was made inside some range and some
line of ours. A replayed graph's kernels all share the replay's correlation. Pure: rows and log in, window out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ..record.timeline import Call, Op, Wait, Window
from .kineto import API, GPU, STREAM_SYNC, SYNC, KinetoRow, call_kind, op_kind
from .log import NO_CONTEXT, NO_PLACE, CallRecord, Log, LogContext
from .stream_waits import holds
from .streams import StreamTable

NOWHERE = -1  # number of a stream that nothing tells
NO_WAIT = 5_000  # ns; a call shorter than this did not wait for the device
TOGETHER = 5_000  # ns between a copy and a sync that one call of torch's makes; an estimate


class Joined(NamedTuple):
    """``abstained`` says why the window must not be counted, ``notes`` what could not be placed."""

    window: Window
    abstained: str | None
    notes: dict[str, int]


@dataclass(frozen=True, slots=True)
class JoinInputs:
    """What rows are joined with. ``threads``: the scheduler's thread as Kineto may number it; ``epoch``: the clock's;
    ``inline``: the largest pageable source, in bytes, that the driver takes inside the call."""

    log: Log
    streams: StreamTable
    threads: frozenset[int]
    epoch: int
    inline: int


def join(rows: Sequence[KinetoRow], source: JoinInputs, *, start: int, end: int) -> Joined:
    """All that was asked for between two instants of the clock. ``rows`` are in order of time.

    What started and stopped the trace lies outside of them, and is left out.
    """
    joining = _Joining(_between(rows, start + source.epoch, end + source.epoch), source)
    log, ops = source.log, list(joining.ops())
    window = Window(
        start,
        max([end, *(op.end + 1 for op in ops)]),
        ranges=log.ranges,
        ops=ops,
        calls=list(joining.calls()),
        waits=list(joining.waits()),
        launched=log.launched,
        settled=log.settled,
    )
    return Joined(window, _unfit(window), joining.notes())


def _between(rows: Sequence[KinetoRow], start: int, end: int) -> list[KinetoRow]:
    """Without calls outside [start, end), and what they set going."""
    others = {row.correlation for row in rows if row.category in API and not start <= row.start < end}
    return [row for row in rows if row.correlation not in others]


@dataclass(slots=True)
class _Joining:
    rows: Sequence[KinetoRow]
    source: JoinInputs
    _call_of: dict[int, KinetoRow] = field(init=False)  # by correlation
    _op_of: dict[int, KinetoRow] = field(init=False)  # the first, where a graph has many
    _sync_of: dict[int, KinetoRow] = field(init=False)
    _blocking: dict[int, KinetoRow] = field(
        init=False
    )  # copies, by their own correlation and that of their sync

    def __post_init__(self) -> None:
        self._call_of = self._first(API)
        self._op_of = self._first(GPU)
        self._sync_of = self._first((SYNC,))
        self._blocking = {key: copy for copy, sync in self._followed_by_sync() for key in _ids(copy, sync)}

    def ops(self) -> Iterator[Op]:
        for row in self.rows:
            if row.category in GPU and (op := self._op(row)) is not None:
                yield op

    def calls(self) -> Iterator[Call]:
        return (call for row in self._mine() if (call := self._call(row)) is not None)

    def waits(self) -> Iterator[Wait]:
        source = self.source
        for hold in holds(self.rows, self._call_of):
            context, _ = self._around(hold.call)
            stream = source.streams.by_cupti(hold.stream)
            yield Wait(stream, hold.start - source.epoch, hold.end - source.epoch, context.step)

    def notes(self) -> dict[str, int]:
        api = [row for row in self.rows if row.category in API]
        gpu = [row for row in self.rows if row.category in GPU]
        return {
            "calls": len(api),
            "calls_of_other_threads": len(api) - len(self._mine()),
            "operations": len(gpu),
            "operations_without_call": sum(row.correlation not in self._call_of for row in gpu),
        }

    def _first(self, categories: Sequence[str]) -> dict[int, KinetoRow]:
        """Rows by correlation; of several the earliest."""
        return {row.correlation: row for row in reversed(self.rows) if row.category in categories}

    def _mine(self) -> list[KinetoRow]:
        threads = self.source.threads
        return [row for row in self.rows if row.category in API and row.thread in threads]

    def _followed_by_sync(self) -> Iterator[tuple[KinetoRow, KinetoRow]]:
        """Copies whose torch call went on to synchronise the stream: torch's blocking copy is these two calls."""
        telling = [row for row in self._mine() if call_kind(row.name) is not None]
        for copy, then in pairwise(telling):
            if call_kind(copy.name) == "copy" and then.name == STREAM_SYNC:
                streams = {self._cupti_stream(copy), self._cupti_stream(then)} - {-1}
                if len(streams) <= 1 and self._same_call(copy, then):
                    yield copy, then

    def _same_call(self, copy: KinetoRow, then: KinetoRow) -> bool:
        """Whether one call of torch's made both. Where nobody watched those: in one range, and too close together
        for Python to have come between."""
        (context, place), (later, next_place) = self._around(copy), self._around(then)
        if place != NO_PLACE or next_place != NO_PLACE:
            return place.call == next_place.call
        return context == later and then.start - copy.end <= TOGETHER

    def _op(self, row: KinetoRow) -> Op | None:
        what = op_kind(row)
        if what is None:
            return None
        kind, memory = what
        call = self._call_of.get(row.correlation)
        context, place = self._around(call)
        epoch = self.source.epoch
        start = row.start - epoch
        # Both sides count alike: torch synced, or the driver could not let the host go on.
        held = memory == "pageable" and (kind == "d2h" or row.bytes > self.source.inline)
        return Op(
            kind=kind,
            name=row.name,
            stream=self.source.streams.by_cupti(row.stream),
            start=start,
            end=row.end - epoch,
            bytes=row.bytes,
            host_bytes=0,
            host_memory=memory,
            blocking=memory != "" and (held or row.correlation in self._blocking),
            range=context.range,
            forward=context.forward,
            step=context.step,
            site=place.site,
            # A short kernel may begin before the call that launched it has returned.
            launched=start if call is None else min(call.end - epoch, start),
        )

    def _call(self, row: KinetoRow) -> Call | None:
        kind = call_kind(row.name)
        if kind is None:
            return None
        context, place = self._around(row)
        epoch, duration = self.source.epoch, row.end - row.start
        waits = duration >= NO_WAIT and (kind in ("sync", "memory") or self._touches_pageable(row))
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

    def _around(self, call: KinetoRow | None) -> tuple[LogContext, CallRecord]:
        """What was open on the scheduler's thread in the middle of a call."""
        source = self.source
        if call is None or call.thread not in source.threads:
            return NO_CONTEXT, NO_PLACE
        middle = (call.start + call.end) // 2 - source.epoch
        return source.log.contexts.at(middle), source.log.places.at(middle)

    def _touches_pageable(self, call: KinetoRow) -> bool:
        op = self._op_of.get(call.correlation)
        what = None if op is None else op_kind(op)
        return what is not None and what[1] == "pageable"

    def _cupti_stream(self, call: KinetoRow) -> int:
        known = self._op_of.get(call.correlation) or self._sync_of.get(call.correlation)
        return -1 if known is None else known.stream

    def _stream(self, call: KinetoRow, place: CallRecord) -> int:
        """Of the operation, the sync record, or the copy that blocks by it; for an event, where it was recorded."""
        if place.stream >= 0:
            return place.stream
        cupti = self._cupti_stream(call)
        if cupti < 0 and (sync := self._sync_of.get(call.correlation)) is not None:
            cupti = sync.source
        if cupti < 0 and (copy := self._blocking.get(call.correlation)) is not None:
            cupti = self._cupti_stream(copy)
        return self.source.streams.by_cupti(cupti) if cupti >= 0 else NOWHERE


def _ids(*calls: KinetoRow) -> Iterator[int]:
    return (call.correlation for call in calls)


def _unfit(window: Window) -> str | None:
    """Why a window is not whole: CUPTI stops recording when its buffers are full, and may be forbidden to begin."""
    if not window.launched:
        return None
    if not window.ops:
        return "the trace has no GPU events: CUPTI gave none (permission?)"
    last = max(info.step for info in window.launched)
    if all(op.step != last for op in window.ops):
        reached = max(op.step for op in window.ops)
        return f"the trace is cut off: step {last} was launched, the last recorded operation is of step {reached}"
    return None
