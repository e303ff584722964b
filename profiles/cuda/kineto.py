"""Rows of a Kineto trace, from the Chrome trace that torch.profiler writes.

The trace file is the same in torch 2.11 and 2.13, while their in-process event objects differ. Nothing here needs a GPU
or torch. Names and fields: pytorch/kineto, libkineto/src/CuptiActivity.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from reprlib import repr as show
from typing import Any, Final, Literal, NamedTuple, cast

from ..record.timeline import CallKind, HostMemory, OpKind

API: Final = ("cuda_runtime", "cuda_driver")
GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset")
SYNC: Final = "cuda_sync"
_KEPT: Final = frozenset((*API, *GPU, SYNC))  # not gpu_user_annotation: streams would seem always busy

WAIT_EVENT: Final = "Stream Wait Event"
_LAST_US: Final = 2.0**53  # microseconds; two centuries and a half
STREAM_SYNC: Final = "cudaStreamSynchronize"

_MEMCPY = re.compile(r"Memcpy (\w+) \((.+) -> (.+)\)")
# Nsight Systems writes cudaMemcpyAsync_v3020; builds with per-thread streams have cudaMemcpyAsync_ptsz
_SUFFIX = re.compile(r"(_ptsz|_ptds)?(_v\d+)?$")
_DIRECTIONS: Final[Mapping[str, OpKind]] = {"HtoD": "h2d", "DtoH": "d2h", "DtoD": "d2d", "PtoP": "d2d"}
# The beginnings of the names, without the cuda of the runtime and the cu of the driver.
_CALLS: Final[tuple[tuple[str, CallKind], ...]] = (
    ("Memcpy", "copy"),
    ("Memset", "copy"),
    ("Launch", "launch"),
    ("GraphLaunch", "graph"),
    ("EventRecord", "event"),
    ("StreamWaitEvent", "event"),
)
# These calls may wait for the device; torch's allocators exist to avoid them.
_MEMORY: Final = (
    "Malloc",
    "Free",
    "HostAlloc",
    "HostRegister",
    "HostUnregister",
    "MemAlloc",
    "MemFree",
    "MemHost",
)


class KinetoRow(NamedTuple):
    """``start`` and ``end`` are in ns since 1970. ``stream`` is CUPTI's number, -1 if there is none. ``waits_for`` is
    the correlation of the event record that a wait waits for, -1 if unknown."""

    category: str
    name: str
    start: int
    end: int
    thread: int
    stream: int
    correlation: int
    bytes: int
    source: int  # the stream whose event a wait waits for
    waits_for: int
    device: int = -1  # of operations and syncs


def rows(trace: Mapping[str, Any], categories: Collection[str] = _KEPT) -> list[KinetoRow]:
    """Rows in order of time, by default CUPTI's. Raises ValueError if ``trace`` is not a Chrome trace."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("not a Chrome trace: no list of traceEvents")
    base = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int):
        raise ValueError(f"not a Chrome trace: baseTimeNanoseconds is {show(base)}")
    found = []
    for event in events:
        if not isinstance(event, dict):
            raise ValueError(f"not a Chrome trace: an event is {show(event)}")
        category = event.get("cat")
        if event.get("ph") == "X" and isinstance(category, str) and category in categories:
            found.append(_row(event, base))
    return sorted(found, key=lambda row: (row.start, row.end))


def _row(event: Mapping[str, Any], base: int) -> KinetoRow:
    args, name = event.get("args", {}), event.get("name")
    if not isinstance(args, dict) or not isinstance(name, str):
        raise ValueError(f"not a Chrome trace: an event has the name {show(name)} and the args {show(args)}")
    start = base + nanoseconds(event, "ts")
    return KinetoRow(
        category=event["cat"],
        name=without_suffix(name) if event["cat"] in API else name,
        start=start,
        end=start + max(nanoseconds(event, "dur"), 0),
        thread=number_of(event.get("tid")),
        stream=number_of(args.get("stream")),
        correlation=number_of(args.get("correlation")),
        bytes=max(number_of(args.get("bytes")), 0),
        source=number_of(args.get("wait_on_stream")),
        waits_for=number_of(args.get("wait_on_cuda_event_record_corr_id")),
        device=number_of(args.get("device")),
    )


def without_suffix(name: str) -> str:
    """A call's name without Nsight Systems' version suffix and without the suffix of per-thread streams."""
    return _SUFFIX.sub("", name)


def nanoseconds(event: Mapping[str, Any], key: str) -> int:
    """The field ``key`` of an event, which is in microseconds. Only a duration may be missing."""
    value = event.get(key, 0 if key == "dur" else None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LAST_US:
        raise ValueError(f"not a Chrome trace: {key} of an event is {show(value)}")
    return round(value * 1000)


def number_of(value: object) -> int:
    """The value as an integer; -1, CUPTI's invalid value, for what is missing or not a number."""
    try:
        return int(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        return -1


def call_kind(name: str) -> CallKind | Literal["memory"] | None:
    """The kind of a call of the runtime or driver; None for queries and other calls that no count is made of."""
    plain = name.removeprefix("cu").removeprefix("da")
    if plain.endswith("Synchronize"):
        return "sync"
    for prefix, kind in _CALLS:
        if plain.startswith(prefix):
            return kind
    return "memory" if plain.startswith(_MEMORY) else None


def op_kind(row: KinetoRow) -> tuple[OpKind, HostMemory] | None:
    """The kind of a GPU row, and the host memory of a copy; None for copies within the host."""
    if row.category == "kernel":
        return "kernel", ""
    if row.category == "gpu_memset":
        return "memset", ""
    match = _MEMCPY.match(row.name)
    if match is None or match[1] not in _DIRECTIONS:
        return None
    kind = _DIRECTIONS[match[1]]
    side = {"h2d": match[2], "d2h": match[3]}.get(kind, "").lower()
    return kind, cast(HostMemory, side) if side in ("pinned", "pageable") else ""
