"""A timeline in the format of Perfetto and chrome://tracing: host, streams, copy engines, waits.

Chrome's JSON, since both viewers read it and it needs no library. Instants are microseconds with three decimals, so
every nanosecond is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from .files import packed_whole
from .timeline import NO_SITE, Call, Names, Op, Range, Site, Window

ENDING: Final = "perfetto.json.gz"
_COPIES: Final = ("h2d", "d2h", "d2d")
_RANGES, _CALLS = 1, 2  # tracks of the host
_WAITS: Final = 100_000  # from the number of a stream's track to that of its waits


class Process(NamedTuple):
    """A group of tracks."""

    number: int
    name: str


HOST: Final = Process(1, "host")
STREAMS: Final = Process(2, "streams")
ENGINES: Final = Process(3, "copy engines")
_GROUPS: Final = 3  # of a rank

Event = dict[str, Any]


class Drawn(Names, Protocol):
    """A timeline with the names of its own records."""

    @property
    def windows(self) -> Sequence[Window]: ...


def draw(path: Path, timelines: Mapping[str, Drawn]) -> int:
    """Write the picture, whole or not at all; returns how many slices it has. Timelines of several ranks are
    drawn below each other on one clock, under their names."""
    count = 0
    with packed_whole(path) as file:
        file.write(b'{"displayTimeUnit":"ns","schedbench":"timeline","traceEvents":[\n')
        for event in merged(timelines):
            file.write((b",\n" if count else b"") + json.dumps(event, separators=(",", ":")).encode())
            count += 1
        file.write(b"\n]}\n")
    return count


def merged(timelines: Mapping[str, Drawn]) -> Iterator[Event]:
    """A lone timeline needs no name."""
    for rank, (name, timeline) in enumerate(timelines.items()):
        for event in events(timeline.windows, tuple(timeline.sites), timeline.streams):
            event["pid"] += rank * _GROUPS
            if event["name"] == "process_name" and len(timelines) > 1:
                event["args"]["name"] = f"{name}: {event['args']['name']}"
            elif event["name"] == "process_sort_index":
                event["args"]["sort_index"] += rank * _GROUPS
            yield event


def events(windows: Iterable[Window], sites: tuple[Site, ...], streams: dict[int, str]) -> Iterator[Event]:
    """Names of the tracks, then slices in the windows' order."""
    yield from _tracks(streams)
    named = set(streams)
    for window in windows:
        for stream in sorted({op.stream for op in window.ops} - named):
            named.add(stream)
            yield from _stream_tracks(stream, f"stream {stream}")
        for span in window.ranges:
            yield _slice(HOST, _RANGES, span.name, span.start, span.end, cat="range", **_of(span))
        for call in window.calls:
            yield from _call(call, sites)
        for op in window.ops:
            yield from _op(op, sites)
        for wait in window.waits:
            track = wait.stream + _WAITS
            yield _slice(
                STREAMS, track, "waits for an event", wait.start, wait.end, cat="wait", step=wait.step
            )


def _tracks(streams: dict[int, str]) -> Iterator[Event]:
    for process in (HOST, STREAMS, ENGINES):
        yield _name("process_name", process, 0, process.name)
        yield {**_name("process_sort_index", process, 0, ""), "args": {"sort_index": process.number}}
    yield _name("thread_name", HOST, _RANGES, "ranges")
    yield _name("thread_name", HOST, _CALLS, "calls")
    for stream, name in sorted(streams.items()):
        yield from _stream_tracks(stream, name)
    for track, direction in enumerate(_COPIES):
        yield _name("thread_name", ENGINES, track, direction)


def _stream_tracks(stream: int, name: str) -> Iterator[Event]:
    yield _name("thread_name", STREAMS, stream, name)
    yield _name("thread_name", STREAMS, stream + _WAITS, f"{name}: waits")


def _name(kind: str, process: Process, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process.number, "tid": track, "args": {"name": name}}


def _call(call: Call, sites: tuple[Site, ...]) -> Iterator[Event]:
    """With the part at its end in which it waited for the device."""
    line = _line(call.site, sites)
    yield _slice(HOST, _CALLS, call.name, call.start, call.end, cat=call.kind, **_of(call), **line)
    if call.waited:
        began = max(call.end - call.waited, call.start)
        yield _slice(HOST, _CALLS, "waits for the device", began, call.end, cat="wait", step=call.step)


def _op(op: Op, sites: tuple[Site, ...]) -> Iterator[Event]:
    """A copy is drawn on its stream and on its copy engine."""
    more: Event = {
        "step": op.step,
        "range": op.range,
        "launched_us": op.launched / 1e3,
        **_line(op.site, sites),
    }
    if op.kind in _COPIES:
        more |= {"bytes": op.bytes, "host_memory": op.host_memory, "blocking": op.blocking}
        track = _COPIES.index(op.kind)
        yield _slice(ENGINES, track, op.name, op.start, op.end, cat=op.kind, stream=op.stream, **more)
    elif op.host_bytes:
        more["host_bytes"] = op.host_bytes
    if op.kernels > 1:
        more["kernels"] = op.kernels
    yield _slice(STREAMS, op.stream, op.name, op.start, op.end, cat=op.kind, **more)


def _of(record: Range | Call) -> Event:
    return {
        "step": record.step,
        **({"size": record.size} if isinstance(record, Range) else {"range": record.range}),
    }


def _line(site: int, sites: tuple[Site, ...]) -> Event:
    if site == NO_SITE or not 0 <= site < len(sites):
        return {}
    found = sites[site]
    return {"line": f"{found.file}:{found.line}", "statement": found.statement}


def _slice(process: Process, track: int, name: str, start: int, end: int, *, cat: str, **more: Any) -> Event:
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "cat": cat, "name": name, "pid": process.number, "tid": track, **times, "args": more}
