"""Tables of an export of any version; a column that is missing reads as None.

An export has only tables with rows, and no indexes. Columns differ between versions, and rows are in no order.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from ....scenarios.problems import show
from ..capture import CaptureFileError

STRINGS: Final = "StringIds"
MAGIC: Final = b"SQLite format 3\x00"
_LARGEST: Final = 2**62  # of any number; sqlite's integers end at 2**63


class Tables:
    """An open export. ``columns`` by table."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self.columns = {name: self._columns_of(name) for (name,) in names if isinstance(name, str)}

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

    def _columns_of(self, table: str) -> Sequence[str]:
        found = self._connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall()
        return [str(column[1]) for column in found]


@contextmanager
def opened(path: Path) -> Iterator[Tables]:
    """Open an export read-only. Raises CaptureFileError for what sqlite cannot read, also while it is read, and
    OSError."""
    with readable(path) as connection:
        yield Tables(connection)


@contextmanager
def readable(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection, as ``opened`` makes one."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CaptureFileError(f"{path}: not an sqlite file")
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            yield connection
    except sqlite3.Error as error:
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
