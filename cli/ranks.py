"""What each rank of a run did, a column each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.table import Table

from .frames import Document, framed, ordered_kinds
from .numbers import MISSING, number, percent, whole

_METRICS: Final = (
    "step_ms",
    "forward_ms",
    "forward_occupancy",
    "gpu_busy",
    "forward_idle_us_per_step",
    "forward_gap_us_per_step",
    "host_stall_us_per_step",
    "exposed_stall_us_per_step",
    "exposed_host_us_per_step",
)
# Of workers that have a part of the requests each.
_REQUESTS: Final = (
    "idle_step_share",
    "ttft_ms",
    "queue_ms",
    "prefill_ms",
    "transfer_ms",
    "decode_queue_ms",
    "cache_hit_ratio",
    "peak_kv_tokens",
    "retractions",
)
_GAP: Final = 3  # between two columns
_IDLE: Final = ("host_late", "dependency", "kernel_gap", "no_work")


def tables(result: Document, *, width: int) -> list[Table]:
    """Rows that no rank has a number for are left out; as many tables as columns of all ranks need."""
    rows = [row for row in _rows(result["ranks"]) if any(cell != MISSING for cell in row[2])]
    columns = [[rank["name"], *(cells[at] for *_, cells in rows)] for at, rank in enumerate(result["ranks"])]
    taken = sum(max(len(row[at]) for row in rows) + _GAP for at in (0, 1))
    return [_table(rows, columns, shown) for shown in _shares(columns, width - taken)]


def _shares(columns: list[list[str]], room: int) -> Iterator[range]:
    """Of the ranks, in order, as many to a table as there is room for, and one at least."""
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
    made = framed(f"by rank{part}")
    made.add_column("")
    made.add_column("unit")
    for at in shown:
        made.add_column(columns[at][0], justify="right")
    for label, unit, cells in rows:
        made.add_row(label, unit, *cells[shown.start : shown.stop])
    return made


def _rows(ranks: list[Document]) -> Iterator[tuple[str, str, list[str]]]:
    yield "role", "", [rank["role"] for rank in ranks]
    for kind in ordered_kinds({kind for rank in ranks for kind in rank["per_step"]}):
        steps = [rank["per_step"].get(kind, {}).get("steps") for rank in ranks]
        yield f"{kind} steps", "", [number(count) if count else MISSING for count in steps]
    requests = () if any(rank["role"] == "pipeline" for rank in ranks) else _REQUESTS
    for name in (*requests, *_METRICS, *_bubbles(ranks)):
        yield _label(name), _unit(ranks, name), [_cell(rank["metrics"].get(name)) for rank in ranks]
    for part in _IDLE:
        yield f"idle: {part.replace('_', ' ')}", "ms", [_idle(rank["idle"], part) for rank in ranks]


def _bubbles(ranks: list[Document]) -> list[str]:
    """A pipeline's, and its parts."""
    return sorted({name for rank in ranks for name in rank["metrics"] if name.startswith("bubble_pct")})


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
