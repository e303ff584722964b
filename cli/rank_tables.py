"""Tables with one column for each rank of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.table import Table

from ..profiles.record.definitions import ReportTable, shown_in
from ..profiles.record.result import IDLE_PARTS
from .page import Document, framed, ordered_kinds
from .text import MISSING, number, percent, whole

_GAP: Final = 3  # between two columns


def tables(result: Document, *, width: int) -> list[Table]:
    """As many tables as the columns of all ranks need. Rows without a number for any rank are left out."""
    rows = [row for row in _rows(result["ranks"]) if any(cell != MISSING for cell in row[2])]
    columns = [[rank["name"], *(cells[at] for *_, cells in rows)] for at, rank in enumerate(result["ranks"])]
    taken = sum(max(len(row[at]) for row in rows) + _GAP for at in (0, 1))
    return [_table(rows, columns, shown) for shown in _shares(columns, width - taken)]


def _shares(columns: list[list[str]], room: int) -> Iterator[range]:
    """The ranks of each table, in order: as many as there is room for, and at least one."""
    first, used = 0, 0
    for at, column in enumerate(columns):
        needed = max(map(len, column)) + _GAP
        if at > first and used + needed - _GAP > room:
            yield range(first, at)
            first, used = at, 0
        used += needed
    yield range(first, len(columns))


def _table(rows: list[tuple[str, str, list[str]]], columns: list[list[str]], shown: range) -> Table:
    part = f", {shown.start + 1} to {shown.stop} of {len(columns)}" if len(shown) < len(columns) else ""
    made = framed(f"by rank{part}", "", "unit", *(f">{columns[at][0]}" for at in shown))
    for label, unit, cells in rows:
        made.add_row(label, unit, *cells[shown.start : shown.stop])
    return made


def _rows(ranks: list[Document]) -> Iterator[tuple[str, str, list[str]]]:
    yield "role", "", [rank["role"] for rank in ranks]
    for kind in ordered_kinds({kind for rank in ranks for kind in rank["per_step"]}):
        steps = [rank["per_step"].get(kind, {}).get("steps") for rank in ranks]
        yield f"{kind} steps", "", [number(count) if count else MISSING for count in steps]
    names = {name for rank in ranks for name in rank["metrics"]}
    staged = any(rank["role"] == "pipeline" for rank in ranks)  # all stages run the same requests
    groups: tuple[ReportTable, ...] = ("rank device",) if staged else ("rank requests", "rank device")
    for name in (name for group in groups for name in shown_in(group, names)):
        yield _label(name), _unit(ranks, name), [_cell(rank["metrics"].get(name)) for rank in ranks]
    for part in IDLE_PARTS:
        if part != "residue":
            yield f"idle: {part.replace('_', ' ')}", "ms", [_idle(rank["idle"], part) for rank in ranks]


def _label(name: str) -> str:
    return (
        name.removesuffix("_us_per_step")
        .removesuffix("_ms")
        .replace("_pct", "")
        .replace("_", " ")
        .replace(".outside", ": before other work")
        .replace(".", ": before ")
    )


def _unit(ranks: list[Document], name: str) -> str:
    units = {rank["metrics"][name].get("unit", "") for rank in ranks if name in rank["metrics"]}
    unit = next(iter(units - {""}), "")
    return "%" if unit == "ratio" else unit.replace("us", "µs")


def _cell(metric: Document | None) -> str:
    if metric is None or "abstained" in metric:
        return MISSING
    value = metric["values"][0]
    return percent(value) if metric["unit"] == "ratio" else number(whole(value))


def _idle(idle: Document, part: str) -> str:
    return MISSING if "abstained" in idle else number(round(idle[f"{part}_us"] / 1e3, 6))
