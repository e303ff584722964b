"""Reads an export of Nsight Systems as a capture: its NVTX ranges and marks, its facts, and what it lacks.

Exports contain the whole environment and the names of the user and the host. Of the tables that have them, only the
versions and the GPU are read, by name.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ...measure.intervals import covered
from ..capture import CapturedRange, CaptureFileError, ProfilerCapture
from . import activity
from .activity import STRINGS, Activity, Tables, number, quoted, readable, whole

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
    with readable(path) as connection:
        tables = Tables(connection)
        strings = tables.strings()
        if not {STRINGS, *METADATA} & {*tables.columns}:
            raise CaptureFileError(f"{path}: not an export of Nsight Systems: no table {STRINGS}")
        yield ProfilerCapture(
            tool="nsys",
            spans=spans(tables, strings),
            rows=lambda thread: Activity(tables, strings, _process(tables, thread)).rows(),
            streams=lambda thread: dict(stream_names(tables, strings, _process(tables, thread))),
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


def _facts(tables: Tables, strings: Mapping[int, str]) -> dict[str, Any]:
    warnings = sum(
        number(severity) >= _WARNING for (severity,) in tables.rows("DIAGNOSTIC_EVENT", ("severity",))
    )
    overhead = covered(
        (start, end)
        for start, end in tables.rows("PROFILER_OVERHEAD", ("start", "end"))
        if isinstance(start, int) and isinstance(end, int) and start < end
    )
    metadata = (row for table in METADATA for row in tables.rows(table, ("name", "value")))
    gpu = next((name for (name,) in tables.rows("TARGET_INFO_GPU", ("name",)) if name), None)
    return {
        "versions": {name: value for name, value in metadata if is_version(name, value)},
        "gpu": strings.get(gpu, "unknown GPU") if isinstance(gpu, int) else gpu,
        "cuda_graph_trace": _graph_mode(tables),
        "warnings_of_the_tool": warnings,
        "overhead_of_the_tool_us": overhead / 1e3,
    }


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
    if STRINGS not in tables:
        yield f"no table {STRINGS}: calls, kernels and registered ranges have no names, and syncs are not counted"
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
    if activity.COPIES in tables and not activity.memory_kinds(tables):
        yield "copies have no kinds of memory: which are pinned or pageable, and block for it, is not known"
    if _graph_mode(tables) == "graph":
        yield "graphs were traced whole: their kernels and copies count as one kernel (--cuda-graph-trace=node)"
    processes = {number(thread) & PROCESS for (thread,) in tables.rows(activity.CALLS, ("globalTid",))}
    if len(processes) > 1 and not tables.has(activity.KERNELS, "globalPid"):
        yield "operations have no process: those of several processes count together"


EVENTS: Final = "NVTX_EVENTS"
_MARK, _PUSHED, _STARTED, _DOMAIN = 34, 59, 60, 75  # eventType
DEFAULT: Final = "default"  # the domain of NVTX with the number 0, which has no name
_COLUMNS: Final = ("eventType", "start", "end", "globalTid", "domainId", "text", "textId")
# The payload's column depends on its type in the program.
_PAYLOADS: Final = ("int64Value", "uint64Value", "int32Value", "uint32Value", "doubleValue", "floatValue")


def spans(tables: Tables, strings: Mapping[int, str]) -> list[CapturedRange]:
    """In order of time, each of the thread that opened it. A range that never closed ends with the capture."""
    domains = _domains(tables, strings)
    instants = (row for table in (EVENTS, activity.CALLS) for row in tables.rows(table, ("start", "end")))
    last = max((at for row in instants for at in row if isinstance(at, int)), default=0)
    rows = tables.rows(EVENTS, (*_COLUMNS, *_PAYLOADS))
    found = (_span(row, strings, domains, last) for row in rows if row[0] in (_MARK, _PUSHED, _STARTED))
    return sorted(found, key=lambda span: (span.start, -span.end))


def stream_names(tables: Tables, strings: Mapping[int, str], process: int) -> Iterator[tuple[int, str]]:
    """The streams that a program named with NVTX. This table has the system's number of its process."""
    table, where = "TARGET_INFO_NVTX_CUDA_STREAM", {"processId": process >> 24 & 0xFFFFFF}
    for stream, name, name_id in tables.rows(table, ("streamId", "name", "nameId"), where):
        text = name if isinstance(name, str) else strings.get(name if name_id is None else name_id, "")
        if isinstance(stream, int) and text:
            yield stream, text


def _domains(tables: Tables, strings: Mapping[int, str]) -> dict[tuple[int, Any], str]:
    """Names of domains by process and number."""
    rows = tables.rows(EVENTS, ("eventType", "globalTid", "domainId", "text", "textId"))
    return {
        (number(thread) & PROCESS, domain): _message(text, text_id, strings)
        for kind, thread, domain, text, text_id in rows
        if kind == _DOMAIN
    }


def _span(
    row: tuple[Any, ...], strings: Mapping[int, str], domains: Mapping[tuple[int, Any], str], last: int
) -> CapturedRange:
    kind, start, end, thread, domain, text, text_id, *payload = row
    begin = whole(start, f"{EVENTS}.start")
    stop = begin if kind == _MARK else last if end is None else whole(end, f"{EVENTS}.end")
    return CapturedRange(
        name=_message(text, text_id, strings),
        start=begin,
        end=max(stop, begin),
        thread=number(thread),
        domain=domains.get((number(thread) & PROCESS, domain), DEFAULT if domain == 0 else ""),
        payload=next((int(value) for value in payload if _is_whole(value)), None),
    )


def _message(text: object, text_id: object, strings: Mapping[int, str]) -> str:
    """The text, or the registered string of its number."""
    if isinstance(text, str):
        return text
    return strings.get(text_id, "") if isinstance(text_id, int) else ""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


_COPIED: Final = (
    EVENTS,
    activity.CALLS,
    activity.SYNCS,
    activity.RECORDS,
    *activity.OPERATIONS,
    "PROFILER_OVERHEAD",
)
_ENUMERATIONS: Final = "ENUM_CU"
_SOME: Final = {
    "TARGET_INFO_GPU": ("id", "name"),
    "TARGET_INFO_NVTX_CUDA_STREAM": ("streamId", "processId", "contextId", "name", "nameId"),
    "DIAGNOSTIC_EVENT": ("timestamp", "severity", "globalPid"),
}
_NAMES: Final = ("nameId", "textId", "shortName", "demangledName", "name")


def scrub(export: Path, output: Path) -> None:
    """Copy an export with only what is read of it, so that it can be shared. Raises CaptureFileError if sqlite cannot
    read the export or if ``output`` is the export, and OSError.

    Nsight Systems writes the environments and command lines of processes, and the names of the user and the host. They
    are in tables of their own, and among the strings that all tables share: only strings that the kept tables refer to
    are copied.
    """
    if output.resolve() == export.resolve():
        raise CaptureFileError(f"{output}: the scrubbed copy needs another name")
    output.unlink(missing_ok=True)
    with readable(export) as connection:
        connection.execute("ATTACH ? AS scrubbed", (output.resolve().as_uri(),))
        connection.execute("BEGIN")
        tables = Tables(connection)
        copied = _copied(tables)
        for table, columns in copied.items():
            _copy(connection, table, columns)
        if STRINGS in tables:
            _copy(connection, STRINGS, ("id", "value"), where=f"id IN ({_named(copied)})")
        for table in METADATA:
            if table in tables:
                versions = [row for row in tables.rows(table, ("name", "value")) if is_version(*row)]
                connection.execute(f"CREATE TABLE scrubbed.{quoted(table)} (name, value)")
                connection.executemany(f"INSERT INTO scrubbed.{quoted(table)} VALUES (?, ?)", versions)
        connection.commit()


def _copied(tables: Tables) -> dict[str, Sequence[str]]:
    """The columns that are copied, by table."""
    return {
        table: [column for column in columns if column in _SOME.get(table, columns)]
        for table, columns in tables.columns.items()
        if table in _COPIED or table in _SOME or table.startswith(_ENUMERATIONS)
    }


def _named(copied: Mapping[str, Sequence[str]]) -> str:
    """A query for the numbers of the strings that the copied tables refer to."""
    names = [(table, column) for table, columns in copied.items() for column in columns if column in _NAMES]
    query = "SELECT {0} FROM scrubbed.{1} WHERE typeof({0}) = 'integer'"
    return " UNION ".join(query.format(quoted(column), quoted(table)) for table, column in names)


def _copy(connection: sqlite3.Connection, table: str, columns: Sequence[str], where: str = "true") -> None:
    listed = ", ".join(map(quoted, columns))
    rows = f"SELECT {listed} FROM main.{quoted(table)} WHERE {where}"
    connection.execute(f"CREATE TABLE scrubbed.{quoted(table)} AS {rows}")
