"""The page of ``verify``: the verdict, the steps, and the differences without and with a known reason."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from .page import Document, Page, framed
from .text import MISSING, number, size, whole

_SOURCES = ("predicted", "announced", "recorded")
_HEADINGS = ("source line", "of", "what", *(f">{source}" for source in _SOURCES), "why")
LINES = 60  # rows of a table on a terminal


def page(document: Document, *, limit: int | None = None) -> Page:
    """Tables have at most ``limit`` rows."""
    reasons = [Text(f"{name}: {reason}") for name, reason in _reasons(document)]
    return Page("verify", [*_tables(document, limit), *reasons], document["conclusion"])


def _tables(document: Document, limit: int | None) -> Iterator[Table]:
    steps = [["", kind, "steps", *map(str, counts), ""] for kind, counts in document["steps"].items()]
    yield _table("steps of each kind", steps, limit)
    for title, name in (
        ("differences without a known reason", "unexplained"),
        ("known differences", "explained"),
    ):
        if document[name]:
            yield _table(title, [_cells(row) for row in document[name]], limit)


def _table(title: str, rows: list[list[str]], limit: int | None) -> Table:
    shown = rows[:limit]
    hidden = len(rows) - len(shown)
    table = framed(title, *_HEADINGS, caption=f"and {hidden} more" if hidden else "")
    for row in shown:
        table.add_row(*row)
    return table


def _cells(row: Document) -> list[str]:
    where = f"{row['file']}: {row['statement']}" if row["file"] else ""
    of = " · ".join(word for word in (row["stream"], row["range"], row["kind"]) if word)
    return [where, of, row["what"], *(_tally(row[name]) for name in _SOURCES), row["why"]]


def _tally(tally: dict[str, float] | None) -> str:
    if tally is None:
        return MISSING
    count = number(whole(tally["count"]))
    return f"{count} ({size(int(tally['bytes']))})" if tally["bytes"] else count


def _reasons(document: Document) -> list[tuple[str, str]]:
    from ..profiles.lab.verification import EXPLANATIONS

    met = {row["why"] for row in document["explained"]}
    return [(one.name, one.reason) for one in EXPLANATIONS if one.name in met]
