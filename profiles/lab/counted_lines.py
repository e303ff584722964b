"""The counts of a run by source line: its copies and syncs, which all sources of counts have.

Kernels are left out, and copies within the device during a forward: where a fused kernel is missing, torch launches
several of both.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ...sched.observe import RANGES
from ..measure.steps import OUTSIDE
from ..record.result import CopyRow, Result, SitePart, SyncRow


class CountedLine(NamedTuple):
    """``what`` is like ``h2d pageable blocking`` for copies, and the call's name for syncs."""

    kind: str
    stream: str
    range: str
    file: str
    function: str
    statement: str
    what: str


class CountAndBytes(NamedTuple):
    times: float
    bytes: float


def counted_lines(result: Result) -> dict[CountedLine, CountAndBytes]:
    """Copies and syncs of the whole run that belong to a step, without copies within the device during forwards."""
    counts: Counter[CountedLine] = Counter()
    sizes: Counter[CountedLine] = Counter()
    for copy in result.copies:
        outside_forward = copy.direction == "d2d" and RANGES.get(copy.range) != "forward"
        if copy.kind != OUTSIDE and (copy.direction in ("h2d", "d2h") or outside_forward):
            words = (copy.direction, copy.host_memory, "blocking" if copy.blocking else "")
            line = _line(copy, " ".join(word for word in words if word))
            counts[line] += copy.count
            sizes[line] += copy.bytes
    for sync in result.syncs:
        if sync.kind != OUTSIDE and sync.sync:
            counts[_line(sync, sync.call)] += sync.count
    return {line: CountAndBytes(count, sizes[line]) for line, count in counts.items()}


def _line(row: CopyRow | SyncRow, what: str) -> CountedLine:
    site = row.site or SitePart(file="", function="", line=0, statement="")
    return CountedLine(row.kind, row.stream, row.range, site.file, site.function, site.statement, what)
