"""A whole timeline as tracks, slices, flows and counters, for viewers of traces. Instants are ns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

from ..record.recording import RecordedTimeline
from ..record.timeline import Call, Op, Range, Wait
from .draw import TimelineView
from .model import KINDS

_COPIES: Final = ("h2d", "d2h", "d2d")
_WAITS: Final = 100_000  # from the number of a stream's track to that of its waits


class Process(NamedTuple):
    """A group of tracks. ``number`` counts from 1 in each rank."""

    number: int
    name: str


HOST: Final = Process(1, "host")
STREAMS: Final = Process(2, "streams")
ENGINES: Final = Process(3, "copy engines")
STEPS: Final = Process(4, "steps")
PROCESSES: Final = (HOST, STREAMS, ENGINES, STEPS)


class Track(NamedTuple):
    process: Process
    number: int
    name: str


RANGES: Final = Track(HOST, 1, "ranges")
CALLS: Final = Track(HOST, 2, "calls")
LOOP: Final = Track(STEPS, 1, "steps")
IDLE: Final = Track(STEPS, 2, "idle")


@dataclass(slots=True)
class TraceSlice:
    """``leads`` are the flows that begin here, ``follows`` those that end as it starts, ``released`` those that end as
    it ends."""

    track: Track
    name: str
    category: str
    start: int
    end: int
    args: dict[str, Any]
    leads: list[int] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)


class TraceCounter(NamedTuple):
    """``values``: from each instant on."""

    name: str
    unit: str
    values: Sequence[tuple[int, int]]


class TraceContent(NamedTuple):
    """``slices`` of one track nest; they are in the order of their starts, the outer ones first."""

    tracks: Sequence[Track]
    slices: Sequence[TraceSlice]
    counters: Sequence[TraceCounter]


def content(timeline: RecordedTimeline, arrivals: Sequence[tuple[int, int]] = ()) -> TraceContent:
    """``arrivals``: of each request, when it arrived and when it had its first token, counted from the first window."""
    found = _Content(TimelineView(timeline))
    slices = sorted(found.slices(), key=lambda piece: (piece.start, -piece.end))
    begin = timeline.windows[0].start if timeline.windows else 0
    waiting = _counted((begin + start, begin + end) for start, end in arrivals)
    counters = [*found.counters(), TraceCounter("waiting", "requests", waiting)]
    tracks = dict.fromkeys([*found.named_tracks(), *(piece.track for piece in slices)])
    return TraceContent([*tracks], slices, [counter for counter in counters if counter.values])


class _Content:
    """Builds the slices of one timeline. Flows are numbered by the slices that they lead to."""

    def __init__(self, view: TimelineView) -> None:
        self._view = view
        self._flows = 0

    def named_tracks(self) -> Iterator[Track]:
        yield from (RANGES, CALLS)
        for stream in sorted(self._view.streams):
            yield from (self._stream(stream), self._waits(stream))
        yield from (Track(ENGINES, number, name) for number, name in enumerate(_COPIES))

    def slices(self) -> Iterator[TraceSlice]:
        view = self._view
        ops = {id(op): self._op(op) for op in view.ops}
        calls = [(call, self._call(call)) for call in view.calls]
        self._launches(calls, ops)
        yield from chain(ops.values(), (piece for _, piece in calls), self._engines())
        for span in view.ranges:
            yield TraceSlice(RANGES, span.name, "range", span.start, span.end, _of(span))
        for wait in chain[Call | Wait]((call for call in view.calls if call.waited), view.waits):
            yield self._wait(wait, ops)
        yield from self._steps()

    def counters(self) -> Iterator[TraceCounter]:
        view = self._view
        spans = [(start, view.steps[step].batch_size) for step, (start, _) in view.forwards.items()]
        copies = [op.end for op in view.ops if op.kind in _COPIES]
        yield TraceCounter("running", "requests", sorted(spans))
        yield TraceCounter("copies", "copies", [(end, n) for n, end in enumerate(copies, start=1)])
        yield TraceCounter("KV", "tokens", view.kv)

    def _stream(self, stream: int) -> Track:
        return Track(STREAMS, stream, self._view.name(stream))

    def _waits(self, stream: int) -> Track:
        return Track(STREAMS, stream + _WAITS, f"{self._view.name(stream)}: waits")

    def _line(self, site: int) -> dict[str, Any]:
        line, statement = self._view.line(site)
        return {"line": line, "statement": statement} if line else {}

    def _op(self, op: Op) -> TraceSlice:
        args = {"step": op.step, "range": op.range, "launched_us": op.launched / 1e3, **self._line(op.site)}
        if op.kind in _COPIES:
            args |= {"bytes": op.bytes, "host_memory": op.host_memory, "blocking": op.blocking}
        elif op.host_bytes:
            args["host_bytes"] = op.host_bytes
        if op.kernels > 1:
            args["kernels"] = op.kernels
        return TraceSlice(self._stream(op.stream), op.name, op.kind, op.start, op.end, args)

    def _engines(self) -> Iterator[TraceSlice]:
        """Copies once more, on their engine."""
        for op in self._view.ops:
            if op.kind in _COPIES:
                args = self._op(op).args | {"stream": op.stream}
                track = Track(ENGINES, _COPIES.index(op.kind), op.kind)
                yield TraceSlice(track, op.name, op.kind, op.start, op.end, args)

    def _call(self, call: Call) -> TraceSlice:
        args = {**_of(call), **self._line(call.site)}
        return TraceSlice(CALLS, call.name, call.kind, call.start, call.end, args)

    def _launches(self, calls: Iterable[tuple[Call, TraceSlice]], ops: Mapping[int, TraceSlice]) -> None:
        """Flows from a call to what it enqueued, which is at the end of the call, or in front of its wait."""
        by_instant = {call.end - call.waited: piece for call, piece in calls if call.kind != "event"}
        for op in self._view.ops:
            if (call := by_instant.get(op.launched)) is not None and op.start >= call.start:
                self._flow(call.leads, ops[id(op)].follows)

    def _wait(self, wait: Call | Wait, ops: Mapping[int, TraceSlice]) -> TraceSlice:
        """With the flow from the operation whose end ended the wait."""
        args: dict[str, Any] = {"step": wait.step}
        if isinstance(wait, Call):
            begun = max(wait.end - wait.waited, wait.start)
            piece = TraceSlice(CALLS, "waits for the device", "wait", begun, wait.end, args)
        else:
            piece = TraceSlice(
                self._waits(wait.stream), "waits for an event", "wait", wait.start, wait.end, args
            )
        if (op := self._view.awaited(wait)) is not None:
            self._flow(ops[id(op)].leads, piece.released)
        return piece

    def _flow(self, leads: list[int], to: list[int]) -> None:
        self._flows += 1
        leads.append(self._flows)
        to.append(self._flows)

    def _steps(self) -> Iterator[TraceSlice]:
        """From the first to the last forward kernel of each step, without what overlaps the step before; and the idle
        time with its causes."""
        reached = 0
        for step, (start, end) in sorted(self._view.forwards.items(), key=lambda item: item[1]):
            if end > reached:
                info = self._view.steps[step]
                args = {"step": step, "requests": info.batch_size, "tokens": info.num_tokens}
                yield TraceSlice(LOOP, f"{info.kind} {step}", "step", max(start, reached), end, args)
            reached = max(reached, end)
        for piece in self._view.idle:
            name = KINDS[piece.cause].removeprefix("idle: ")
            yield TraceSlice(IDLE, name, "idle", piece.start, piece.end, {"step": piece.step})


def _of(record: Range | Call) -> dict[str, Any]:
    more = {"size": record.size} if isinstance(record, Range) else {"range": record.range}
    return {"step": record.step, **more}


def _counted(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """How many of the spans are open, at each instant at which that changes."""
    open_now, found = 0, dict[int, int]()
    for at, by in sorted((at, by) for start, end in spans for at, by in ((start, 1), (end, -1))):
        open_now += by
        found[at] = open_now
    return list(found.items())
