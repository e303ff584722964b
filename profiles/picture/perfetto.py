"""Traces for ui.perfetto.dev: Perfetto's own protobuf, or the JSON that chrome://tracing reads too.

JSON has instants in microseconds with three decimals, so every nanosecond is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..record.files import packed_whole, replaced
from .trace import PROCESSES, Process, TraceContent, TraceSlice, Track

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

PROTOBUF: Final = (".pftrace", ".pftrace.gz", ".perfetto-trace")
_SEQUENCE: Final = 1  # all packets are of one writer

Event = dict[str, Any]


def draw(path: Path, timelines: Mapping[str, TraceContent]) -> int:
    """Write the trace, whole or not at all; returns how many events it has. The ending of the file chooses the format.
    Timelines of several ranks are drawn below each other on one clock, under their names."""
    if path.name.endswith(PROTOBUF):
        return _draw_packets(path, timelines)
    number = 0
    with packed_whole(path) as file:
        file.write(b'{"displayTimeUnit":"ns","schedbench":"timeline","traceEvents":[\n')
        for event in merged(timelines):
            file.write((b",\n" if number else b"") + json.dumps(event, separators=(",", ":")).encode())
            number += 1
        file.write(b"\n]}\n")
    return number


def merged(timelines: Mapping[str, TraceContent]) -> Iterator[Event]:
    """The events of all ranks. A lone timeline needs no name."""
    flows = 0
    for rank, (name, found) in enumerate(timelines.items()):
        offset = rank * len(PROCESSES)
        for event in events(found, name if len(timelines) > 1 else ""):
            event["pid"] += offset
            if event["name"] == "process_sort_index":
                event["args"]["sort_index"] += offset
            if "id" in event:
                event["id"] += flows
            yield event
        flows += _flows(found)


def _flows(found: TraceContent) -> int:
    return sum(len(piece.leads) for piece in found.slices)


def events(found: TraceContent, rank: str = "") -> Iterator[Event]:
    """Names of the tracks, slices with their flows, counters."""
    for process in PROCESSES:
        yield _name("process_name", process, 0, f"{rank}: {process.name}" if rank else process.name)
        yield {**_name("process_sort_index", process, 0, ""), "args": {"sort_index": process.number}}
    for track in found.tracks:
        yield _name("thread_name", track.process, track.number, track.name)
    for piece in found.slices:
        yield _slice(piece)
        yield from _flow_events(piece)
    for counter in found.counters:
        for at, value in counter.values:
            place = {"pid": PROCESSES[-1].number, "tid": 0, "ts": at / 1e3}
            yield {"ph": "C", "name": counter.name, **place, "args": {counter.unit: value}}


def _name(kind: str, process: Process, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process.number, "tid": track, "args": {"name": name}}


def _at(track: Track, at: int) -> Event:
    return {"pid": track.process.number, "tid": track.number, "ts": at / 1e3}


def _slice(piece: TraceSlice) -> Event:
    place = {**_at(piece.track, piece.start), "dur": (piece.end - piece.start) / 1e3}
    return {"ph": "X", "cat": piece.category, "name": piece.name, **place, "args": piece.args}


def _flow_events(piece: TraceSlice) -> Iterator[Event]:
    """A flow belongs to the slice around its instant; one that ends with its slice is a nanosecond early."""
    ends = max(piece.start, piece.end - 1)
    for flow in piece.leads:
        yield {"ph": "s", "cat": "flow", "name": "flow", "id": flow, **_at(piece.track, piece.start)}
    for flows, at in ((piece.follows, piece.start), (piece.released, ends)):
        for flow in flows:
            yield {"ph": "f", "cat": "flow", "name": "flow", "id": flow, "bp": "e", **_at(piece.track, at)}


def _draw_packets(path: Path, timelines: Mapping[str, TraceContent]) -> int:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    number = 0
    with packed_whole(path) if path.suffix == ".gz" else replaced(path) as file:
        for packet in packets(timelines):
            file.write(Trace(packet=[packet]).SerializeToString())
            number += 1
    return number


def packets(timelines: Mapping[str, TraceContent]) -> Iterator[TracePacket]:
    """Of each rank the tracks, then the events of each track in the order of time. A rank's groups of tracks have a
    parent, because the format orders only tracks that have one: they are shown in the order of their descriptors."""
    numbers, flows = count(1), 0
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
        yield from _slice_packets(found.slices, identities, flows)
        yield from _counter_packets(found, numbers, group)
        flows += _flows(found)


def _described(number: int, name: str, **fields: Any) -> TracePacket:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor

    order = {"sibling_order_rank": number, "child_ordering": TrackDescriptor.EXPLICIT}
    return _packet(track_descriptor=TrackDescriptor(uuid=number, name=name, **order, **fields))


def _packet(**fields: Any) -> TracePacket:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

    return TracePacket(trusted_packet_sequence_id=_SEQUENCE, **fields)


def _slice_packets(
    slices: Sequence[TraceSlice], identities: Mapping[Track, int], flows: int
) -> Iterator[TracePacket]:
    """Begins and ends of the slices of each track as they nest."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    opened: dict[Track, list[TraceSlice]] = {track: [] for track in identities}

    def closed(track: Track, until: int | None) -> Iterator[TracePacket]:
        while opened[track] and (until is None or opened[track][-1].end <= until):
            piece = opened[track].pop()
            event = TrackEvent(type=TrackEvent.TYPE_SLICE_END, track_uuid=identities[track])
            event.terminating_flow_ids.extend(flows + flow for flow in piece.released)
            yield _packet(timestamp=piece.end, track_event=event)

    for piece in slices:
        yield from closed(piece.track, piece.start)
        opened[piece.track].append(piece)
        event = TrackEvent(
            type=TrackEvent.TYPE_SLICE_BEGIN,
            track_uuid=identities[piece.track],
            name=piece.name,
            categories=[piece.category],
            flow_ids=[flows + flow for flow in piece.leads],
            terminating_flow_ids=[flows + flow for flow in piece.follows],
            debug_annotations=[_annotation(name, value) for name, value in piece.args.items()],
        )
        yield _packet(timestamp=piece.start, track_event=event)
    for track in identities:
        yield from closed(track, None)


def _annotation(name: str, value: Any) -> Any:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation

    kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
    return DebugAnnotation(name=name, **{kinds[type(value)]: value})


def _counter_packets(found: TraceContent, numbers: Iterator[int], group: int) -> Iterator[TracePacket]:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor, TrackEvent

    for counter in found.counters:
        track = next(numbers)
        described = CounterDescriptor(unit_name=counter.unit)
        yield _described(track, counter.name, parent_uuid=group, counter=described)
        for at, value in counter.values:
            event = TrackEvent(type=TrackEvent.TYPE_COUNTER, track_uuid=track, counter_value=value)
            yield _packet(timestamp=at, track_event=event)
