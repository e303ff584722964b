"""A whole timeline as tracks, slices, flows and counters, and traces of these for ui.perfetto.dev: Perfetto's own
protobuf, or the JSON that chrome://tracing reads too.

Instants are ns. JSON has them in microseconds with three decimals, so every nanosecond is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..measure.intervals import counted
from ..record.files import packed_whole, replaced
from ..record.recording import RecordedTimeline
from ..record.timeline import Call, Op, Range, Wait
from .draw import TimelineView
from .model import KINDS

Event = dict[str, Any]
Packet = Any  # Perfetto's TracePacket, which has no types

PROTOBUF: Final = (".pftrace", ".pftrace.gz", ".perfetto-trace")
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


def content(
    timeline: RecordedTimeline, arrivals: Sequence[tuple[int, int]] = (), flows: Iterator[int] | None = None
) -> TraceContent:
    """``arrivals``: of each request, when it arrived and when it had its first token, counted from the first window.
    ``flows``: the numbers of flows, which the timelines of one trace share."""
    found = _Content(TimelineView(timeline), flows or count(1))
    slices = sorted(found.slices(), key=lambda piece: (piece.start, -piece.end))
    begin = timeline.windows[0].start if timeline.windows else 0
    waiting = counted((begin + start, begin + end) for start, end in arrivals)
    counters = [*found.counters(), TraceCounter("waiting", "requests", waiting)]
    tracks = dict.fromkeys([*found.named_tracks(), *(piece.track for piece in slices)])
    return TraceContent([*tracks], slices, [counter for counter in counters if counter.values])


class _Content:
    """Builds the slices of one timeline. Flows are numbered by the slices that they lead to."""

    def __init__(self, view: TimelineView, flows: Iterator[int]) -> None:
        self._view = view
        self._flows = flows

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
        track, name, begun = self._waits(wait.stream), "waits for an event", wait.start
        if isinstance(wait, Call):
            awaited = "another rank" if wait.kind == "link" else "the device"
            track, name, begun = CALLS, f"waits for {awaited}", max(wait.end - wait.waited, wait.start)
        piece = TraceSlice(track, name, "wait", begun, wait.end, {"step": wait.step})
        if (op := self._view.awaited(wait)) is not None:
            self._flow(ops[id(op)].leads, piece.released)
        return piece

    def _flow(self, leads: list[int], to: list[int]) -> None:
        flow = next(self._flows)
        leads.append(flow)
        to.append(flow)

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


def draw(path: Path, timelines: Mapping[str, TraceContent]) -> int:
    """Write the trace, whole or not at all; returns how many events it has. The ending of the file chooses the format.
    Timelines of several ranks are drawn below each other on one clock, under their names."""
    number, writing = 0, packed_whole if path.suffix == ".gz" else replaced
    if path.name.endswith(PROTOBUF):
        with writing(path) as file:
            for packet in packets(timelines):
                file.write(_proto().Trace(packet=[packet]).SerializeToString())
                number += 1
        return number
    with writing(path) as file:
        file.write(b'{"displayTimeUnit":"ns","schedbench":"timeline","traceEvents":[\n')
        for event in merged(timelines):
            file.write((b",\n" if number else b"") + json.dumps(event, separators=(",", ":")).encode())
            number += 1
        file.write(b"\n]}\n")
    return number


def merged(timelines: Mapping[str, TraceContent]) -> Iterator[Event]:
    """The events of all ranks."""
    for rank, (name, found) in enumerate(timelines.items()):
        for event in events(found, name):
            event["pid"] += rank * len(PROCESSES)
            if event["name"] == "process_sort_index":
                event["args"]["sort_index"] = event["pid"]
            yield event


def events(found: TraceContent, rank: str = "") -> Iterator[Event]:
    """Names of the tracks, slices with their flows, counters."""
    for process in PROCESSES:
        yield _name("process_name", process, 0, f"{rank}: {process.name}" if rank else process.name)
        yield {**_name("process_sort_index", process, 0, ""), "args": {"sort_index": process.number}}
    for track in found.tracks:
        yield _name("thread_name", track.process, track.number, track.name)
    for piece in found.slices:
        place = {**_at(piece.track, piece.start), "dur": (piece.end - piece.start) / 1e3}
        yield {"ph": "X", "cat": piece.category, "name": piece.name, **place, "args": piece.args}
        yield from _flow_events(piece)
    for counter in found.counters:
        for at, value in counter.values:
            place = {"pid": PROCESSES[-1].number, "tid": 0, "ts": at / 1e3}
            yield {"ph": "C", "name": counter.name, **place, "args": {counter.unit: value}}


def _name(kind: str, process: Process, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process.number, "tid": track, "args": {"name": name}}


def _at(track: Track, at: int) -> Event:
    return {"pid": track.process.number, "tid": track.number, "ts": at / 1e3}


def _flow_events(piece: TraceSlice) -> Iterator[Event]:
    """A flow belongs to the slice around its instant; one that ends with its slice is a nanosecond early."""
    ends = max(piece.start, piece.end - 1)
    for flow in piece.leads:
        yield {"ph": "s", "cat": "flow", "name": "flow", "id": flow, **_at(piece.track, piece.start)}
    for flows, at in ((piece.follows, piece.start), (piece.released, ends)):
        for flow in flows:
            yield {"ph": "f", "cat": "flow", "name": "flow", "id": flow, "bp": "e", **_at(piece.track, at)}


def _proto() -> Any:
    """The classes of Perfetto's protobuf, whose import takes longer than writing a small trace as JSON."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

    return perfetto_trace_pb2


def packets(timelines: Mapping[str, TraceContent]) -> Iterator[Packet]:
    """Of each rank the tracks, then the events of each track in the order of time. A rank's groups of tracks have a
    parent, because the format orders only tracks that have one: they are shown in the order of their descriptors."""
    numbers = count(1)
    for name, found in timelines.items():
        identities: dict[Track, int] = {}
        rank = next(numbers)
        yield _described(rank, name or "schedbench")
        for process in PROCESSES:
            group = next(numbers)
            yield _described(group, process.name, parent_uuid=rank)
            for track in (track for track in found.tracks if track.process == process):
                identities[track] = next(numbers)
                yield _described(identities[track], track.name, parent_uuid=group)
        yield from _slice_packets(found.slices, identities)
        yield from _counter_packets(found, numbers, group)


def _described(number: int, name: str, **fields: Any) -> Packet:
    descriptor = _proto().TrackDescriptor
    order = {"sibling_order_rank": number, "child_ordering": descriptor.EXPLICIT}
    return _packet(track_descriptor=descriptor(uuid=number, name=name, **order, **fields))


def _packet(**fields: Any) -> Packet:
    """All packets are of one writer, the first."""
    return _proto().TracePacket(trusted_packet_sequence_id=1, **fields)


def _slice_packets(slices: Sequence[TraceSlice], identities: Mapping[Track, int]) -> Iterator[Packet]:
    """Begins and ends of the slices of each track as they nest."""
    track_event = _proto().TrackEvent
    opened: dict[Track, list[TraceSlice]] = {track: [] for track in identities}

    def closed(track: Track, until: int | None) -> Iterator[Packet]:
        while opened[track] and (until is None or opened[track][-1].end <= until):
            piece = opened[track].pop()
            event = track_event(type=track_event.TYPE_SLICE_END, track_uuid=identities[track])
            event.terminating_flow_ids.extend(piece.released)
            yield _packet(timestamp=piece.end, track_event=event)

    for piece in slices:
        yield from closed(piece.track, piece.start)
        opened[piece.track].append(piece)
        event = track_event(
            type=track_event.TYPE_SLICE_BEGIN,
            track_uuid=identities[piece.track],
            name=piece.name,
            categories=[piece.category],
            flow_ids=piece.leads,
            terminating_flow_ids=piece.follows,
            debug_annotations=[_annotation(name, value) for name, value in piece.args.items()],
        )
        yield _packet(timestamp=piece.start, track_event=event)
    for track in identities:
        yield from closed(track, None)


def _annotation(name: str, value: Any) -> Any:
    kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
    return _proto().DebugAnnotation(name=name, **{kinds[type(value)]: value})


def _counter_packets(found: TraceContent, numbers: Iterator[int], group: int) -> Iterator[Packet]:
    track_event = _proto().TrackEvent
    for counter in found.counters:
        track = next(numbers)
        described = _proto().CounterDescriptor(unit_name=counter.unit)
        yield _described(track, counter.name, parent_uuid=group, counter=described)
        for at, value in counter.values:
            event = track_event(type=track_event.TYPE_COUNTER, track_uuid=track, counter_value=value)
            yield _packet(timestamp=at, track_event=event)
