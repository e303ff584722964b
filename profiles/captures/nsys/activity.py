"""The tables of an export, and its calls and operations as rows of the kind that Kineto's traces give.

An export of any version has only tables with rows, and no indexes. Columns differ between versions, and a missing one
reads as None; rows are in no order.
"""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from ....scenarios.problems import show
from ...cuda.kineto import SYNC, WAIT_EVENT, KinetoRow, without_suffix
from ..capture import CaptureFileError

STRINGS: Final = "StringIds"
MAGIC: Final = b"SQLite format 3\x00"
_LARGEST: Final = 2**62  # of any number; sqlite's integers end at 2**63


class Tables:
    """An open export. ``columns`` by table."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self.columns = {
            name: [str(column) for _, column, *_ in connection.execute(f"PRAGMA table_info({quoted(name)})")]
            for (name,) in names
            if isinstance(name, str)
        }

    def __contains__(self, table: str) -> bool:
        return table in self.columns

    def has(self, table: str, *columns: str) -> bool:
        return set(columns) <= {*self.columns.get(table, ())}

    def rows(
        self, table: str, columns: Sequence[str], where: Mapping[str, int] | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Rows with the given values in the columns of ``where`` that the table has."""
        known = self.columns.get(table)
        if not known:
            return iter(())
        wanted = ", ".join(quoted(column) if column in known else "NULL" for column in columns)
        kept = {column: value for column, value in (where or {}).items() if column in known}
        condition = " AND ".join(f"{quoted(column)} = ?" for column in kept)
        query = f"SELECT {wanted} FROM {quoted(table)}" + (f" WHERE {condition}" if kept else "")
        return self._connection.execute(query, tuple(kept.values()))

    def any(self, table: str, column: str) -> bool:
        """Whether some row has a value other than 0 in that column."""
        return self.has(table, column) and any(value for (value,) in self.rows(table, (column,)))

    def strings(self) -> dict[int, str]:
        return {
            key: value
            for key, value in self.rows(STRINGS, ("id", "value"))
            if isinstance(key, int) and isinstance(value, str)
        }

    def labels(self, table: str) -> dict[int, str]:
        """The exporter's names of an enumeration's numbers; empty if there is no such table."""
        return {
            key: str(label or name or "").lower()
            for key, name, label in self.rows(table, ("id", "name", "label"))
            if isinstance(key, int)
        }


@contextmanager
def readable(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an export read-only. Raises CaptureFileError for what sqlite cannot read, also while it is read, and
    OSError."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CaptureFileError(f"{path}: not an sqlite file")
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            yield connection
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter for names of columns
        raise CaptureFileError(f"{path}: sqlite cannot read it: {error}") from None


def whole(value: object, what: str) -> int:
    """``value`` as an integer. Raises CaptureFileError, which names ``what`` it should have been."""
    if isinstance(value, bool) or not isinstance(value, int) or not -_LARGEST < value < _LARGEST:
        raise CaptureFileError(f"{what}: expected a whole number, got {show(value)}")
    return value


def number(value: object) -> int:
    """``value``, or -1 for what is not an integer, as in Kineto's rows."""
    return value if isinstance(value, int) else -1


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


CALLS: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSETS: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
SYNCS: Final = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
RECORDS: Final = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
OPERATIONS: Final = (KERNELS, COPIES, MEMSETS, GRAPHS)

_DRIVER: Final = 1  # eventClass
_SYNC_NAMES: Final = {1: "Event Sync", 2: WAIT_EVENT, 3: "Stream Sync", 4: "Context Sync"}
_PLACE: Final = ("start", "end", "streamId", "correlationId", "deviceId")
_NONE: Final = -1


class Activity(NamedTuple):
    """The activity of one process. ``process`` is the upper bits of its threads' numbers, which its operations have
    too."""

    tables: Tables
    strings: Mapping[int, str]
    process: int

    def rows(self) -> list[KinetoRow]:
        """In order of time. Raises CaptureFileError for a cell with an impossible value."""
        found = [*self._calls(), *self._kernels(), *self._copies(), *self._others(), *self._syncs()]
        return sorted(found, key=lambda row: (row.start, row.end))

    def _calls(self) -> Iterator[KinetoRow]:
        columns = ("start", "end", "correlationId", "globalTid", "nameId", "eventClass")
        for start, end, correlation, thread, name, kind in self.tables.rows(CALLS, columns):
            if number(thread) & ~0xFFFFFF == self.process:
                category = "cuda_driver" if kind == _DRIVER else "cuda_runtime"
                text = without_suffix(self.strings.get(name, ""))
                place = start, end, _NONE, correlation, _NONE
                yield _row(CALLS, category, text, place, thread=number(thread))

    def _kernels(self) -> Iterator[KinetoRow]:
        for *place, short, demangled in self._of(KERNELS, (*_PLACE, "shortName", "demangledName")):
            name = self.strings.get(short) or self.strings.get(demangled) or "kernel"
            yield _row(KERNELS, "kernel", name, place)

    def _copies(self) -> Iterator[KinetoRow]:
        labels, kinds = self.tables.labels("ENUM_CUDA_MEMCPY_OPER"), memory_kinds(self.tables)
        directions = {**_DIRECTIONS, **{key: _direction(label) for key, label in labels.items()}}
        columns = (*_PLACE, "bytes", "copyKind", "srcKind", "dstKind")
        for *place, size, kind, source, target in self._of(COPIES, columns):
            ends = f"{kinds.get(source, UNKNOWN)} -> {kinds.get(target, UNKNOWN)}"
            name = f"Memcpy {directions.get(kind, UNKNOWN)} ({ends})"
            yield _row(COPIES, "gpu_memcpy", name, place, size=size)

    def _others(self) -> Iterator[KinetoRow]:
        for *place, size in self._of(MEMSETS, (*_PLACE, "bytes")):
            yield _row(MEMSETS, "gpu_memset", "Memset", place, size=size)
        for *place, graph in self._of(GRAPHS, (*_PLACE, "graphId")):
            yield _row(GRAPHS, "kernel", f"graph {number(graph)}", place)

    def _syncs(self) -> Iterator[KinetoRow]:
        """Each has the stream and the call of its event's last record before the call that waits for it."""
        records: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for event, stream, correlation in self._of(RECORDS, ("eventId", "streamId", "correlationId")):
            if number(event) >= 0:
                records[event].append((number(correlation), number(stream)))
        for of_event in records.values():
            of_event.sort()  # in the order of their calls: the table has no times
        for *place, kind, event in self._of(SYNCS, (*_PLACE, "syncType", "eventId")):
            name = _SYNC_NAMES.get(number(kind), "Sync")
            row = _row(SYNCS, SYNC, name, place)
            made = records[number(event)]
            at = bisect_left(made, (row.correlation, _NONE))
            record, source = made[at - 1] if at else (_NONE, _NONE)
            on_stream = row.stream if name in (WAIT_EVENT, "Stream Sync") else _NONE
            yield row._replace(stream=on_stream, source=source, waits_for=record)

    def _of(self, table: str, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
        return self.tables.rows(table, columns, {"globalPid": self.process})


def _row(
    table: str, category: str, name: str, place: Sequence[object], *, thread: int = _NONE, size: object = 0
) -> KinetoRow:
    """``place`` has the values of ``_PLACE``. Raises CaptureFileError for an impossible instant."""
    start, end, stream, correlation, device = place
    begin = whole(start, f"{table}.start")
    stop = max(whole(end, f"{table}.end"), begin)
    where = (thread, number(stream), number(correlation), max(number(size), 0))
    return KinetoRow(category, name, begin, stop, *where, _NONE, _NONE, number(device))


UNKNOWN: Final = "Unknown"
_KINDS: Final = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
_NSYS: Final = dict(enumerate(_KINDS))
_CUPTI: Final = dict(enumerate(_KINDS, start=1))
_DIRECTIONS: Final = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_DEVICE: Final = ((_NSYS, 2), (_CUPTI, 3))
_WAY: Final = re.compile(r"(host|device|array|peer|[hdap])[\s_-]*to[\s_-]*(host|device|array|peer|[hdap])$")


def memory_kinds(tables: Tables) -> Mapping[int, str]:
    """The kinds of memory by their numbers in the table of copies; empty where they are unknown.

    Nsight Systems has other numbers than CUPTI. They are taken from the export's enumeration; in an export without it,
    they are those by which every copy to or from the host has the device at its other end.
    """
    if labels := tables.labels("ENUM_CUDA_MEM_KIND"):
        return {key: _kind(label) for key, label in labels.items()}
    ends = {
        target if kind == 1 else source
        for kind, source, target in tables.rows(COPIES, ("copyKind", "srcKind", "dstKind"))
        if kind in (1, 2)
    }
    return next((kinds for kinds, device in _DEVICE if ends == {device}), {})


def _direction(label: str) -> str:
    """``host-to-device``, ``HtoD`` and the like."""
    match = _WAY.search(label)
    if match is None:
        return UNKNOWN
    return f"{match[1][0]}to{match[2][0]}".replace("h", "H").replace("d", "D").replace("p", "P")


def _kind(label: str) -> str:
    """The longest known kind in the label."""
    plain = label.replace("_", " ")
    return max((kind for kind in _KINDS if kind.lower() in plain), key=len, default=UNKNOWN)
