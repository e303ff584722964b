"""Rows of a Kineto trace, from the Chrome trace that torch.profiler writes.

That file is the surface that torch 2.11 and 2.13 share: their in-process event objects differ. Nothing here needs
a GPU, or torch. Names and fields: pytorch/kineto, libkineto/src/CuptiActivity.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import repr as show
from typing import Any, Final, Literal, NamedTuple, cast

from ..record.timeline import CallKind, HostMemory, OpKind

API: Final = ("cuda_runtime", "cuda_driver")
GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset")
SYNC: Final = "cuda_sync"
_KEPT: Final = frozenset((*API, *GPU, SYNC))  # gpu_user_annotation would count a stream as always busy

WAIT_EVENT: Final = "Stream Wait Event"
_LAST_US: Final = 2.0**53  # microseconds; two centuries and a half
STREAM_SYNC: Final = "cudaStreamSynchronize"

_MEMCPY = re.compile(r"Memcpy (\w+) \((.+) -> (.+)\)")
# nsys writes cudaMemcpyAsync_v3020, builds with per-thread streams cudaMemcpyAsync_ptsz
_SUFFIX = re.compile(r"(_ptsz|_ptds)?(_v\d+)?$")
_DIRECTIONS: Final[Mapping[str, OpKind]] = {"HtoD": "h2d", "DtoH": "d2h", "DtoD": "d2d", "PtoP": "d2d"}
_CALLS: Final[tuple[tuple[str, CallKind], ...]] = (
    ("cudaMemcpy", "copy"),
    ("cuMemcpy", "copy"),
    ("cudaMemset", "copy"),
    ("cuMemset", "copy"),
    ("cudaLaunch", "launch"),
    ("cuLaunch", "launch"),
    ("cudaGraphLaunch", "graph"),
    ("cuGraphLaunch", "graph"),
    ("cudaStreamSynchronize", "sync"),
    ("cudaEventSynchronize", "sync"),
    ("cudaDeviceSynchronize", "sync"),
    ("cudaEventRecord", "event"),
    ("cudaStreamWaitEvent", "event"),
)
# Calls for memory wait for the device where they have to ask the driver; torch's allocators exist to avoid them.
_MEMORY: Final = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "cudaHostUnregister")


class KinetoRow(NamedTuple):
    """``start`` and ``end`` in ns since 1970. ``stream`` is CUPTI's; -1 where a row has none. ``waits_for`` is
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


def rows(trace: Mapping[str, Any]) -> list[KinetoRow]:
    """What CUPTI reported, in order of time. Raises ValueError for what is no trace."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("not a Chrome trace: no list of traceEvents")
    base = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int):
        raise ValueError(f"not a Chrome trace: baseTimeNanoseconds is {show(base)}")
    found = (_row(event, base) for event in events if _is_kept(event))
    return sorted(found, key=lambda row: (row.start, row.end))


def _is_kept(event: Any) -> bool:
    if not isinstance(event, dict):
        raise ValueError(f"not a Chrome trace: an event is {show(event)}")
    category = event.get("cat")
    return event.get("ph") == "X" and isinstance(category, str) and category in _KEPT


def _row(event: Mapping[str, Any], base: int) -> KinetoRow:
    more, name = event.get("args", {}), event.get("name")
    if not isinstance(more, dict) or not isinstance(name, str):
        raise ValueError(f"not a Chrome trace: an event has the name {show(name)} and the args {show(more)}")
    start = base + nanoseconds(event, "ts")
    return KinetoRow(
        category=event["cat"],
        name=without_suffix(name) if event["cat"] in API else name,
        start=start,
        end=start + nanoseconds(event, "dur"),
        thread=number_of(event.get("tid")),
        stream=number_of(more.get("stream")),
        correlation=number_of(more.get("correlation")),
        bytes=max(number_of(more.get("bytes")), 0),
        source=number_of(more.get("wait_on_stream")),
        waits_for=number_of(more.get("wait_on_cuda_event_record_corr_id")),
    )


def without_suffix(name: str) -> str:
    """A call's name without the version that Nsight Systems puts behind it, and without the kind of its streams."""
    return _SUFFIX.sub("", name)


def nanoseconds(event: Mapping[str, Any], key: str) -> int:
    """Chrome counts microseconds. Only a duration may be left out."""
    value = event.get(key, 0 if key == "dur" else None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LAST_US:
        raise ValueError(f"not a Chrome trace: {key} of an event is {show(value)}")
    return round(value * 1000)


def number_of(value: object) -> int:
    """-1 for what is missing or no number, as CUPTI's own invalid value."""
    try:
        return int(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        return -1


def call_kind(name: str) -> CallKind | Literal["memory"] | None:
    """What a call of the runtime or driver is for; None for queries and the like."""
    for prefix, kind in _CALLS:
        if name.startswith(prefix):
            return kind
    return "memory" if name.startswith(_MEMORY) else None


def op_kind(row: KinetoRow) -> tuple[OpKind, HostMemory] | None:
    """What a GPU row did, and for a copy which kind of host memory it touched; None for host-to-host copies."""
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
