"""What each rank of a run did, a column each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.table import Table

from .frames import KINDS, Document, framed, ordered
from .numbers import MISSING, number, percent, whole

_METRICS: Final = (
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
_IDLE: Final = ("host_late", "dependency", "kernel_gap", "no_work")


def table(result: Document) -> Table:
    """Rows that no rank has a number for are left out."""
    made = framed("by rank")
    made.add_column("")
    made.add_column("unit")
    for rank in result["ranks"]:
        made.add_column(rank["name"], justify="right")
    for label, unit, cells in _rows(result["ranks"]):
        if any(cell != MISSING for cell in cells):
            made.add_row(label, unit, *cells)
    return made


def _rows(ranks: list[Document]) -> Iterator[tuple[str, str, list[str]]]:
    yield "role", "", [rank["role"] for rank in ranks]
    for kind in ordered({kind for rank in ranks for kind in rank["per_step"]}, KINDS):
        steps = [rank["per_step"].get(kind, {}).get("steps") for rank in ranks]
        yield f"{kind} steps", "", [number(count) if count else MISSING for count in steps]
    requests = () if any(rank["role"] == "pipeline" for rank in ranks) else _REQUESTS
    for name in (*requests, *_METRICS, *_others(ranks)):
        yield _label(name), _unit(ranks, name), [_cell(rank["metrics"].get(name)) for rank in ranks]
    for part in _IDLE:
        yield f"idle: {part.replace('_', ' ')}", "ms", [_idle(rank["idle"], part) for rank in ranks]


def _others(ranks: list[Document]) -> list[str]:
    """Metrics of worlds: a bubble, and its parts."""
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
