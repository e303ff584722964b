"""The critical path: what bounds the time of each kind of step on the virtual GPU.

The time of a step is from the end of the forward before it to the end of its own, so that the steps of a run add up to
its forward window. The path covers every instant of the window once. It is followed backwards from the end of the last
forward, always to what the present part could not start without::

    host      |-- prepare --|- launch -|                       |- settle -|- prepare -|
    device                             |-- kernel --|-- copy --|
                            <-------- kernel <------- copy <---- wait (return of the sync)

An operation of the device starts at the latest of: its launch, the end of the operation before it on its stream (with
the gap between two kernels), the end of an operation whose event its stream waits for, and the end of the operation
that occupied its engine. The simulation takes the maximum of these, so the one that equals the start is what bounded
it. A call that waits returns when the operation that it waits for has ended.

This is not the split into exposed and hidden time, which looks at one instant: host work is hidden while a forward
runs. The path looks at consequences. Where the host is the slower side and never waits for the device, the host bounds
all of the time, also that in which forwards run, since a faster forward would only end earlier. Where the device is the
slower side, hidden host work bounds nothing. The share of a part is at most what the run gains without it: without the
part, another path may be the longest. ``worth`` runs that case.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, TypeAlias

import numpy as np

from ...sched.observe import SLEEP
from ..record.timeline import Call, Op, Range, Window
from .steps import StepPeriod

KERNEL, COPY, LAUNCH, WAIT, GAP, NO_WORK, UNNAMED = (
    "kernels", "copies", "launches", "waits", "gaps", "no work", "host in no range",
)  # fmt: skip
_HOST: Final = "host"  # part of the path that the host's ranges and calls split further
_CHUNK: Final = 64  # steps whose records are followed at once
_AHEAD: Final = 16  # later steps from which the path comes


class PathTimes:
    """``parts`` in ns, which add up to the time of all ``steps`` of a kind. Those of the host have the names of their
    innermost ranges."""

    def __init__(self) -> None:
        self.steps = 0
        self.parts: Counter[str] = Counter()


_Piece = tuple[int, int, str]  # start, end and part of the path
_Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class CriticalPathSink:
    """Folds windows and the periods of steps into ``kinds``. ``sync_return``: from the end of what a sync waits for to
    its return, ns."""

    def __init__(self, sync_return: int) -> None:
        self.kinds: defaultdict[str, PathTimes] = defaultdict(PathTimes)
        self._sync_return = sync_return
        self._ops: list[Op] = []
        self._calls: list[Call] = []
        self._ranges: list[Range] = []
        self._held: set[tuple[int, int]] = set()  # stream, and when an event let it go on
        self._periods: list[StepPeriod] = []

    def feed(self, window: Window, periods: Sequence[StepPeriod]) -> None:
        """``periods``: of the steps that the window completes, in order."""
        self._ops += window.ops
        self._calls += [call for call in window.calls if call.end > call.start]
        self._ranges += [entry for entry in window.ranges if entry.end > entry.start]
        self._held |= {(wait.stream, wait.end) for wait in window.waits}
        self._periods += periods
        if len(self._periods) >= _CHUNK + _AHEAD:
            self._settle(len(self._periods) - _AHEAD)

    def finish(self, periods: Sequence[StepPeriod]) -> None:
        self._periods += periods
        self._settle(len(self._periods))

    def _settle(self, count: int) -> None:
        """Attribute the time of the first ``count`` steps, and forget their records."""
        if not count:
            return
        done, self._periods = self._periods[:count], self._periods[count:]
        last = (self._periods or done)[-1].end
        path = _Path(self._ops, self._held, self._calls, self._sync_return)
        self._attribute(done, path.back(last, done[0].start))
        reached = done[-1].end
        self._ops = [op for op in self._ops if op.end >= reached]
        self._calls = [call for call in self._calls if call.end > reached]
        self._ranges = [entry for entry in self._ranges if entry.end > reached]
        self._held = {(stream, end) for stream, end in self._held if end >= reached}

    def _attribute(self, periods: Sequence[StepPeriod], path: Sequence[_Piece]) -> None:
        """Cut time where the path, the host's work or the period changes, and add up the cuts by kind and part.
        ``path`` begins at or behind the end of the last period, is in reverse order and leaves no instant out."""
        kinds, names = _Numbers(), _Numbers()
        begins, kind_of = _columns([(period.start, kinds[period.kind]) for period in periods], 2)
        starts, part_of = _columns([(start, names[part]) for start, _, part in reversed(path)], 2)
        changes, host_part = _innermost(self._ranges, self._calls, names)
        cuts = np.sort(np.concatenate([begins, starts, changes, [periods[-1].end, path[0][1]]]))
        cuts = cuts[(cuts >= begins[0]) & (cuts <= path[0][1])]
        at = cuts[:-1]
        part = _value(at, starts, part_of)
        part = np.where(part == names[_HOST], _value(at, changes, host_part), part)
        place = _value(at, begins, kind_of) * len(names) + part
        times = np.zeros(len(kinds) * len(names), np.int64)
        np.add.at(times, place, np.diff(np.minimum(cuts, periods[-1].end)))
        for kind, steps in Counter(period.kind for period in periods).items():
            self.kinds[kind].steps += steps
        for number in dict.fromkeys(place[::-1].tolist()):
            kind, named = divmod(number, len(names))
            self.kinds[[*kinds][kind]].parts[[*names][named]] += int(times[number])


class _Numbers(dict[str, int]):
    """Numbers of names, in the order of their first use."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> _Integers:
    return np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * width).reshape(-1, width).T


def _value(instants: _Integers, changes: _Integers, values: _Integers) -> _Integers:
    """The value that holds at each instant, of values that hold from their change on."""
    return values[np.searchsorted(changes, instants, side="right") - 1]


def _innermost(
    ranges: Sequence[Range], calls: Sequence[Call], names: _Numbers
) -> tuple[_Integers, _Integers]:
    """When the innermost range or call of the host changes, in order, and which part it is from then on."""
    rows = [
        (entry.start, entry.end, names[NO_WORK if entry.name == SLEEP else f"host {entry.name}"])
        for entry in ranges
    ]
    launch, wait, unnamed = names[LAUNCH], names[WAIT], names[UNNAMED]
    rows += [(call.start, call.end, launch) for call in calls]
    rows += [(call.end - call.waited, call.end, wait) for call in calls if call.waited]
    starts, ends, parts = _columns(rows, 3)
    alphabetical = np.argsort(np.argsort([*names]))
    nested = np.lexsort((alphabetical[parts], -ends, starts))  # at one instant, the longest first
    starts, ends, parts = starts[nested], ends[nested], parts[nested]
    order = np.argsort(np.concatenate([ends, starts]), kind="stable")  # at one instant, ends before starts
    opens = order >= len(ends)
    depth = np.cumsum(np.where(opens, 1, -1))
    found = np.full(len(order), unnamed)
    # Of one depth, the entry that was opened last is open.
    for level in range(1, int(depth.max(initial=0)) + 1):
        opened = np.maximum.accumulate(np.where(opens & (depth == level), np.arange(len(order)), -1))
        here = depth == level
        found[here] = parts[order[opened[here]] - len(ends)]
    changes = np.concatenate([ends, starts])[order]
    return np.append(np.iinfo(np.int64).min, changes), np.append(unnamed, found)


class _Path:
    """Follows the records backwards. An operation's number is its place in the order of ends."""

    def __init__(
        self, ops: Sequence[Op], held: set[tuple[int, int]], calls: Sequence[Call], sync_return: int
    ) -> None:
        self._ops = sorted(ops, key=attrgetter("end", "start"))
        self._ends = [op.end for op in self._ops]
        newest: dict[int, int] = {}
        self._before: list[int | None] = []  # the operation before each on its stream
        for number, op in enumerate(self._ops):
            self._before.append(newest.get(op.stream))
            newest[op.stream] = number
        # Calls that waited for an operation, not for another rank.
        self._waits = sorted((c for c in calls if c.waited and c.kind != "link"), key=attrgetter("end"))
        self._wait_starts = [call.end - call.waited for call in self._waits]
        self._held = held
        self._sync_return = sync_return

    def back(self, last: int, first: int) -> list[_Piece]:
        """What bounds the time from ``first`` to ``last``, the latest part first."""
        pieces: list[_Piece] = []
        now, at = last, self._ended_at(last)
        while now > first:
            end = now
            if at is None:
                now, at = self._on_host(end, first)
                pieces.append((now, end, _HOST))
                continue
            op = self._ops[at]
            pieces.append((op.start, op.end, KERNEL if op.kind == "kernel" else COPY))
            now, at = self._cause(op, at)
            if now < op.start:
                held = at is None or (op.stream, op.start) in self._held
                pieces.append((now, op.start, WAIT if held else GAP))
        return pieces

    def _cause(self, op: Op, at: int) -> tuple[int, int | None]:
        """When what the operation could not start without was done, and its number; that of the host is None, as is
        that of something that is not on this device."""
        if op.launched >= op.start:
            return op.start, None
        before = self._before[at]
        if before is None or self._ends[before] != op.start:
            other = self._ended_at(op.start, below=at)
            if other is not None:
                return op.start, other
            if before is None or self._ends[before] <= op.launched:
                return op.launched, None
        return self._ends[before], before

    def _ended_at(self, instant: int, *, below: int | None = None, stream: int | None = None) -> int | None:
        """The last operation before number ``below`` that ended at that instant, on ``stream`` if one did there."""
        at = bisect_right(self._ends, instant) - 1
        last = at = at if below is None else min(at, below - 1)
        while at >= 0 and self._ends[at] == instant:
            if stream is None or self._ops[at].stream == stream:
                return at
            at -= 1
        return None if at == last else last

    def _on_host(self, now: int, first: int) -> tuple[int, int | None]:
        """The end and number of the last operation that the host waited for before ``now``, or else ``first``."""
        for number in range(bisect_left(self._wait_starts, now) - 1, -1, -1):
            call = self._waits[number]
            if call.end <= first:
                break
            for instant in (call.end, call.end - self._sync_return):
                if call.end - call.waited < instant <= now:
                    at = self._ended_at(instant, stream=call.stream)
                    if at is not None:
                        return instant, at
        return first, None
