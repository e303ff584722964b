"""Reads an export of Nsight Systems as a capture.

Exports contain the whole environment and the names of the user and the host. Of the tables that have them, only the
versions and the GPU are read, by name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ...measure.intervals import covered
from ..capture import ProfilerCapture
from . import activity
from .activity import Activity
from .memory_kinds import MemoryKinds
from .ranges import EVENTS, spans, stream_names
from .tables import Tables, number, opened

PROCESS: Final = ~0xFFFFFF
METADATA: Final = ("META_DATA_EXPORT", "META_DATA_CAPTURE")
_VERSIONS: Final = re.compile(
    r"(EXPORT_|EXPORT:)?(SCHEMA|PRODUCT|NSYS|TOOL|EXPORTER)[A-Z_:]*VERSION", re.IGNORECASE
)
_VERSION: Final = re.compile(r"[0-9][0-9A-Za-z.\-+]{0,39}")
_WARNING: Final = 2  # severity in DIAGNOSTIC_EVENT; larger ones are worse


@contextmanager
def open_export(path: Path) -> Iterator[ProfilerCapture]:
    """A capture whose rows can be read until the block ends. Raises CaptureFileError, OSError."""
    with opened(path) as tables:
        strings = tables.strings()
        yield ProfilerCapture(
            tool="nsys",
            spans=spans(tables, strings),
            rows=lambda thread: Activity(tables, strings, _process(tables, thread)).rows(),
            streams=dict(
                stream for process in _processes(tables) for stream in stream_names(tables, strings, process)
            ),
            facts=_facts(tables, strings),
            missing=tuple(_missing(tables)),
        )


def _process(tables: Tables, thread: int | None) -> int:
    """The process of a thread; for None, the one with most calls, or with most operations if there are no calls."""
    if thread is not None:
        return thread & PROCESS
    calls = Counter(number(caller) & PROCESS for (caller,) in tables.rows(activity.CALLS, ("globalTid",)))
    operations = Counter(
        number(process) for table in activity.OPERATIONS for (process,) in tables.rows(table, ("globalPid",))
    )
    return (calls or operations or Counter((0,))).most_common(1)[0][0]


def _processes(tables: Tables) -> list[int]:
    return sorted({number(thread) & PROCESS for (thread,) in tables.rows(activity.CALLS, ("globalTid",))})


def _facts(tables: Tables, strings: Mapping[int, str]) -> dict[str, Any]:
    warnings = sum(
        number(severity) >= _WARNING for (severity,) in tables.rows("DIAGNOSTIC_EVENT", ("severity",))
    )
    overhead = covered(
        (start, end)
        for start, end in tables.rows("PROFILER_OVERHEAD", ("start", "end"))
        if isinstance(start, int) and isinstance(end, int) and start < end
    )
    gpu = next((name for (name,) in tables.rows("TARGET_INFO_GPU", ("name",)) if name), None)
    return {
        "versions": _versions(tables),
        "gpu": strings.get(gpu, "unknown GPU") if isinstance(gpu, int) else gpu,
        "cuda_graph_trace": _graph_mode(tables),
        "warnings_of_the_tool": warnings,
        "overhead_of_the_tool_us": overhead / 1e3,
    }


def _versions(tables: Tables) -> dict[str, str]:
    rows = (row for table in METADATA for row in tables.rows(table, ("name", "value")))
    return {name: value for name, value in rows if is_version(name, value)}


def is_version(name: object, value: object) -> bool:
    """Whether the name and the value are those of a version."""
    named = isinstance(name, str) and _VERSIONS.fullmatch(name)
    return bool(named and isinstance(value, str) and _VERSION.fullmatch(value))


def _graph_mode(tables: Tables) -> str:
    """``graph`` if a replay is one operation, ``node`` if its kernels are recorded, ``none`` without graphs,
    ``unknown`` if the export does not say which kernels are a graph's."""
    if any(tables.rows(activity.GRAPHS, ("start",))):
        return "graph"
    if any(tables.any(table, "graphNodeId") for table in activity.OPERATIONS):
        return "node"
    launched = any(name.startswith("cudaGraphLaunch") for name in tables.strings().values())
    return "unknown" if launched else "none"


def _missing(tables: Tables) -> Iterator[str]:
    operations = any(any(tables.rows(table, ("start",))) for table in activity.OPERATIONS)
    if EVENTS not in tables:
        yield "no NVTX ranges: operations and calls belong to no step"
    if not operations:
        yield "no GPU activity: there are no counts of the device (-t cuda was off, or there was no GPU)"
        return
    if activity.CALLS not in tables:
        yield "no calls of CUDA's API: operations belong to no range, and syncs are not counted"
    if activity.SYNCS not in tables:
        yield "no synchronisation records: syncs have no stream, and waits of one stream for another are not seen"
    elif activity.RECORDS not in tables:
        yield "no event records: waits of one stream for another count as kernel gap or launch latency"
    if activity.COPIES in tables and not MemoryKinds.of(tables, activity.COPIES).known:
        yield "copies have no kinds of memory: pinned, pageable and blocking copies are not counted as such"
    if _graph_mode(tables) == "graph":
        yield "graphs were traced whole: their kernels and copies count as one kernel (--cuda-graph-trace=node)"
    if len(_processes(tables)) > 1 and not tables.has(activity.KERNELS, "globalPid"):
        yield "operations have no process: those of several processes cannot be told apart"
