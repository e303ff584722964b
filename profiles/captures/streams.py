"""Finds a capture's forward and schedule streams: by name, by number, or by the operations on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ...sched.observe import Category
from ..cuda.join import NOWHERE
from ..cuda.streams import StreamTable
from ..record.timeline import Window
from .maps import RangeMap

BUSIEST: Final = "busiest"
FORWARD: Final = "forward"
SCHEDULE: Final = "schedule"


@dataclass(frozen=True, slots=True)
class StreamRoles:
    """``names`` by the records' numbers. ``forward`` is the only stream of forward operations, or None for any."""

    names: dict[int, str]
    forward: int | None


def stream_roles(
    window: Window, table: StreamTable, meaning: RangeMap, given: Collection[int]
) -> StreamRoles:
    """``given`` are the streams that the program named; ``table`` has their names, and numbers for the others. The
    program's name of a stream is kept, unless the map names that stream."""
    rule, found = meaning.streams, dict(table.names)
    forward = _found(rule.forward, table, _busiest(window, meaning, FORWARD))
    schedule = _found(rule.schedule, table, _busiest(window, meaning, SCHEDULE, but=forward))
    if schedule is not None and schedule != forward and (rule.schedule is not None or schedule not in given):
        found[schedule] = SCHEDULE
    if forward is not None and (rule.forward is not None or forward not in given):
        found[forward] = FORWARD
    return StreamRoles(found, forward if rule.forward is not None else None)


def restrict_forward(window: Window, forward: int | None) -> Window:
    """Count the operations of other streams than ``forward`` as no forward operations."""
    if forward is not None:
        window.ops = [
            op if op.stream == forward or not op.forward else op._replace(forward=False) for op in window.ops
        ]
    return window


def _found(rule: int | str | None, table: StreamTable, busiest: int | None) -> int | None:
    if rule is None or rule == BUSIEST:
        return busiest
    if isinstance(rule, int):
        return table.by_cupti(rule)
    return next((number for number, name in table.names.items() if name == rule), None)


def _busiest(window: Window, meaning: RangeMap, category: Category, *, but: int | None = None) -> int | None:
    """The stream with the most time in operations that ranges of the category launched. In forward ranges only kernels
    count."""
    inside = {rule.name for rule in meaning.ranges if rule.category == category}
    time: Counter[int] = Counter()
    for op in window.ops:
        if (
            op.range in inside
            and op.stream not in (but, NOWHERE)
            and (category != FORWARD or op.kind == "kernel")
        ):
            time[op.stream] += op.end - op.start
    return max(sorted(time), key=lambda stream: time[stream], default=None)
