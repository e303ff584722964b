"""Rows of the result with resolved sites and streams, in a stable order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..record.result import CopyRow, CountSummary, KindCounts, SitePart, SyncRow
from ..record.timeline import Names
from .counts import CounterKey, CountsPerStep
from .lines import CallLine, CopyLine, Cost
from .steps import STEADY

Line = TypeVar("Line", CopyLine, CallLine)


def stream_name(names: Names, stream: int) -> str:
    return names.streams.get(stream, f"stream {stream}")


def per_step(
    steps: Mapping[str, int], tallies: Mapping[CounterKey, CountsPerStep], names: Names
) -> dict[str, KindCounts]:
    streams: dict[str, dict[str, dict[str, CountSummary]]] = {kind: {} for kind in sorted(steps)}
    for place, tally in tallies.items():
        counters = streams[place.kind].setdefault(stream_name(names, place.stream), {})
        counters[place.counter] = CountSummary(**tally._asdict())
    return {kind: KindCounts.model_validate({"steps": steps[kind], **streams[kind]}) for kind in streams}


def copy_rows(lines: Mapping[CopyLine, Cost], names: Names) -> tuple[CopyRow, ...]:
    """Sorted by exposed time, then by waited time, then by count, largest first."""
    rows = [
        CopyRow(
            direction=line.direction,
            host_memory=line.host_memory,
            blocking=line.blocking,
            bytes=cost.bytes,
            **_common(names, line, cost, steady),
        )
        for line, (cost, steady) in _without_steady(lines).items()
    ]
    return tuple(sorted(rows, key=_weight))


def sync_rows(lines: Mapping[CallLine, Cost], names: Names) -> tuple[SyncRow, ...]:
    """In the order of ``copy_rows``."""
    rows = [
        SyncRow(call=line.call, sync=line.sync, **_common(names, line, cost, steady))
        for line, (cost, steady) in _without_steady(lines).items()
    ]
    return tuple(sorted(rows, key=_weight))


def _common(names: Names, line: CopyLine | CallLine, cost: Cost, steady: int) -> dict[str, Any]:
    """The fields that both kinds of row have."""
    return {
        "site": site_part(names, line.site),
        "range": line.range,
        "kind": line.kind,
        "stream": stream_name(names, line.stream),
        "count": cost.count,
        "steady": steady,
        "host_us": cost.host_ns / 1e3,
        "exposed_us": cost.exposed_ns / 1e3,
    }


def site_part(names: Names, site: int) -> SitePart | None:
    return SitePart(**names.sites[site]._asdict()) if site >= 0 else None


def _without_steady(lines: Mapping[Line, Cost]) -> dict[Line, tuple[Cost, int]]:
    """Adds the lines of steady decodes to those of all decodes, and keeps their count."""
    merged: dict[Line, tuple[Cost, int]] = {}
    for line, cost in lines.items():
        kind = line.kind.removesuffix(STEADY)
        whole, steady = merged.get(line._replace(kind=kind), (Cost(), 0))
        whole.add(cost)
        merged[line._replace(kind=kind)] = whole, steady + (cost.count if kind != line.kind else 0)
    return merged


def _weight(row: CopyRow | SyncRow) -> tuple[float, float, int, str]:
    return -row.exposed_us, -row.host_us, -row.count, row.model_dump_json()
