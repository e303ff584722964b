"""Which streams of a capture are forward and schedule, by name, by number, or by what ran on them."""

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
class Named:
    """``names`` by the records' numbers. ``forward`` is the stream of all forward operations; None where any may be."""

    names: dict[int, str]
    forward: int | None


def named(window: Window, table: StreamTable, meaning: RangeMap, given: Collection[int]) -> Named:
    """``table`` has the program's own names, of the streams that are ``given`` one, and numbers for the rest. A name
    that the program gave stays, unless the map tells another."""
    told, found = meaning.streams, dict(table.names)
    forward = _found(told.forward, table, _busiest(window, meaning, FORWARD))
    schedule = _found(told.schedule, table, _busiest(window, meaning, SCHEDULE, but=forward))
    if schedule is not None and schedule != forward and (told.schedule is not None or schedule not in given):
        found[schedule] = SCHEDULE
    if forward is not None and (told.forward is not None or forward not in given):
        found[forward] = FORWARD
    return Named(found, forward if told.forward is not None else None)


def restricted(window: Window, forward: int | None) -> Window:
    """With forward operations on that stream only."""
    if forward is not None:
        window.ops = [
            op if op.stream == forward or not op.forward else op._replace(forward=False) for op in window.ops
        ]
    return window


def _found(told: int | str | None, table: StreamTable, busiest: int | None) -> int | None:
    if told is None or told == BUSIEST:
        return busiest
    if isinstance(told, int):
        return table.by_cupti(told)
    return next((number for number, name in table.names.items() if name == told), None)


def _busiest(window: Window, meaning: RangeMap, category: Category, *, but: int | None = None) -> int | None:
    """Of operations launched inside ranges of the category, the stream with most of their time; of forward ranges'
    operations only kernels count."""
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
