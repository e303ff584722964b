"""Copies an export with only what is read of it, so that it can be shared.

Nsight Systems writes the environments and command lines of processes, and the names of the user and the host. They are
in tables of their own, and among the strings that all tables share: only strings that the kept tables refer to are
copied.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from ..capture import CaptureFileError
from . import activity
from .reader import EVENTS, METADATA, is_version
from .tables import STRINGS, quoted, readable

_WHOLE: Final = (
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
    """Raises CaptureFileError if sqlite cannot read the export or if ``output`` is the export, and OSError."""
    if output.resolve() == export.resolve():
        raise CaptureFileError(f"{output}: the scrubbed copy needs another name")
    output.unlink(missing_ok=True)
    with readable(export) as source, closing(sqlite3.connect(output)) as target:
        _Copy(source, target).all()
        target.commit()


class _Copy:
    """Copies tables from one connection to another."""

    def __init__(self, source: sqlite3.Connection, target: sqlite3.Connection) -> None:
        self._source, self._target = source, target
        self._strings: set[int] = set()
        names = source.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self._tables = {name for (name,) in names if isinstance(name, str)}

    def all(self) -> None:
        for table in sorted(self._tables):
            if table in _WHOLE or table.startswith(_ENUMERATIONS):
                self._table(table, self._columns(table))
            elif table in _SOME:
                self._table(table, [column for column in self._columns(table) if column in _SOME[table]])
        self._kept_strings()
        self._versions()

    def _columns(self, table: str) -> list[str]:
        return [str(row[1]) for row in self._source.execute(f"PRAGMA table_info({quoted(table)})")]

    def _table(self, table: str, columns: list[str]) -> None:
        listed = ", ".join(map(quoted, columns))
        named = [at for at, column in enumerate(columns) if column in _NAMES]
        self._create(table, columns)
        for row in self._source.execute(f"SELECT {listed} FROM {quoted(table)}"):
            self._strings.update(row[at] for at in named if isinstance(row[at], int))
            self._insert(table, row)

    def _kept_strings(self) -> None:
        self._create(STRINGS, ["id", "value"])
        if STRINGS in self._tables:
            for key, value in self._source.execute(f"SELECT id, value FROM {quoted(STRINGS)}"):
                if key in self._strings:
                    self._insert(STRINGS, (key, value))

    def _versions(self) -> None:
        for table in METADATA:
            if table in self._tables:
                self._create(table, ["name", "value"])
                for name, value in self._source.execute(f"SELECT name, value FROM {quoted(table)}"):
                    if is_version(name, value):
                        self._insert(table, (name, value))

    def _create(self, table: str, columns: list[str]) -> None:
        self._target.execute(f"CREATE TABLE {quoted(table)} ({', '.join(map(quoted, columns))})")

    def _insert(self, table: str, row: tuple[object, ...]) -> None:
        places = ", ".join("?" * len(row))
        self._target.execute(f"INSERT INTO {quoted(table)} VALUES ({places})", row)
