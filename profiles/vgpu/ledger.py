"""The records of a device, delivered as windows of a timeline.

Rows are plain tuples, of which a window has the columns. A window is cut right after the last forward
operation of a settled step, so that no step's forward is split between windows.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ...sched.observe import RANGES, StepInfo
from ..record.timeline import Call, Op, Range, Records, Sink, Wait, Window

if TYPE_CHECKING:
    from .engine import QueueWait, Row, Served

WINDOW_STEPS = 64
WINDOW_CALLS = 10_000  # calls after which the next settled step ends a window
MAX_CALLS = 40_000  # calls after which a window ends at once


class LedgerContext(NamedTuple):
    """The innermost open range, as records carry it. A range of unknown name has the category of the enclosing one."""

    range: str
    step: int
    forward: bool

    def inside(self, name: str, step: int) -> LedgerContext:
        category = RANGES.get(name)
        return LedgerContext(name, step, category == "forward" if category else self.forward)

    def after(self, enclosing: LedgerContext) -> LedgerContext:
        """The context when this range, which lies in the ``enclosing`` one, has closed. What is issued between two
        ranges belongs to the step of the first: a copy or wait that a change adds there counts in its step."""
        return enclosing if enclosing.range else LedgerContext("", self.step, False)


NO_CONTEXT = LedgerContext("", -1, False)
PlainContext = tuple[str, int, bool]
"""The fields of a LedgerContext. A plain tuple is made and taken apart in a third of the time."""

# A row of an operation has the fields of timeline.Op without start and end, which come before these two.
_FORWARD, _STEP = (Op._fields.index(name) - 2 for name in ("forward", "step"))


class Ledger:
    """Gathers one device's records and feeds them to a sink."""

    def __init__(self, sink: Sink | None, *, served: list[Served], waits: list[QueueWait]) -> None:
        # Rows with the fields of Call and of Range. Each ends where the host's clock is, so they are in order of ends.
        self.calls: list[Row] = []
        self.ranges: list[Row] = []
        self._launched: list[StepInfo] = []
        self._settled: list[StepInfo] = []
        self._sink = sink
        self._served = served
        self._waits = waits
        self._start = 0
        self._steps = 0

    def launched(self, info: StepInfo) -> None:
        self._launched.append(info)

    def settled(self, info: StepInfo) -> bool:
        """Add a settled step; returns whether a window is to be cut after it."""
        self._settled.append(info)
        self._steps += 1
        return self._steps >= WINDOW_STEPS or len(self.calls) >= WINDOW_CALLS

    def quiet_point(self, step: int, now: int) -> int:
        """The instant after that step's last forward operation."""
        ends: list[int] = [end for row, _, end in self._served if row[_STEP] == step and row[_FORWARD]]
        return min(max(ends) + 1, now) if ends else now

    def cut(self, at: int) -> None:
        """Deliver all records that ended before ``at``, which is not after the host's clock."""
        ranges = bisect_left(self.ranges, at, key=itemgetter(Range._fields.index("end")))
        calls = bisect_left(self.calls, at, key=itemgetter(Call._fields.index("end")))
        if self._sink is not None:
            self._sink.feed(self._window(at, ranges, calls))
        del self.ranges[:ranges]
        del self.calls[:calls]
        self._served[:] = [s for s in self._served if s[2] >= at]
        self._waits[:] = [h for h in self._waits if h.end >= at]
        self._start, self._steps = at, 0
        self._launched, self._settled = [], []

    def end(self) -> int:
        """An instant after every record."""
        ends: list[int] = [
            self._start,
            *(s[2] for s in self._served),
            *(c[3] for c in self.calls),
            *(r[4] for r in self.ranges),
        ]
        return max(ends) + 1

    @property
    def empty(self) -> bool:
        return not (self._served or self.calls or self.ranges or self._launched or self._settled)

    def _window(self, at: int, ranges: int, calls: int) -> Window:
        """The first ``ranges`` and ``calls``, and the operations and waits that ended before ``at``."""
        return Window(
            self._start,
            at,
            ranges=Records.of(Range, self.ranges[:ranges]),
            ops=_ops([served for served in self._served if served[2] < at]),
            calls=Records.of(Call, self.calls[:calls]),
            waits=[Wait(h.queue, h.start, h.end, h.row[_STEP]) for h in self._waits if h.end < at],
            launched=self._launched,
            settled=self._settled,
        )


def _ops(served: list[Served]) -> Records[Op]:
    if not served:
        return Records.of(Op, ())
    rows, starts, ends = zip(*served, strict=True)
    fields = [*zip(*rows, strict=True)]
    return Records(Op._make((*fields[:3], starts, ends, *fields[3:])))
