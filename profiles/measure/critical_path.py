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
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

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


_BY_HOST: Final = -1  # in place of the number of an operation
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
        self._attribute(done, path.back(last, done[0].start), last)
        reached = done[-1].end
        self._ops = [op for op in self._ops if op.end >= reached]
        self._calls = [call for call in self._calls if call.end > reached]
        self._ranges = [entry for entry in self._ranges if entry.end > reached]
        self._held = {(stream, end) for stream, end in self._held if end >= reached}

    def _attribute(self, periods: Sequence[StepPeriod], path: _PathParts, last: int) -> None:
        """Cut time where the path, the host's work or the period changes, and add up the cuts by kind and part. The
        path ends at ``last``, at or behind the end of the last period, and leaves no instant out."""
        kinds, names = _Numbers(), _Numbers()
        kind = [period.kind for period in periods]
        values = [
            (_column(periods, "start"), kinds.of(kind)),
            (np.array(path.starts[::-1], np.int64), names.of(path.parts[::-1])),
            _innermost(self._ranges, self._calls, names),
        ]
        end = periods[-1].end
        cuts, (kind_of, path_part, host_part) = _merged(values, [end, last])
        inside = np.flatnonzero((cuts[:-1] >= periods[0].start) & (np.diff(cuts) > 0) & (cuts[:-1] < last))
        part = np.where(path_part == names[_HOST], host_part, path_part)[inside]
        place = kind_of[inside] * len(names) + part
        cuts = np.minimum(cuts, end)
        # In float64, which is exact: a run takes less than 2**53 ns.
        times = np.bincount(place, cuts[inside + 1] - cuts[inside])
        for named, steps in Counter(kind).items():
            self.kinds[named].steps += steps
        newest = np.full(len(times), -1)
        newest[place] = np.arange(len(place))
        for number in np.argsort(-newest, kind="stable")[: np.count_nonzero(newest >= 0)].tolist():
            at_kind, at_name = divmod(number, len(names))
            self.kinds[[*kinds][at_kind]].parts[[*names][at_name]] += int(times[number])


class _Numbers(dict[str, int]):
    """Numbers of names, in the order of their first use."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number

    def of(self, names: Iterable[str]) -> _Integers:
        return np.array([self[name] for name in names], np.int64)


def _column(records: Sequence[Any], field: str) -> _Integers:
    return np.fromiter(map(attrgetter(field), records), np.int64, len(records))


def _merged(
    values: Sequence[tuple[_Integers, _Integers]], others: Sequence[int]
) -> tuple[_Integers, list[_Integers]]:
    """Merge the instants of all ``values``, each with the value that holds from it on, and ``others``. Returns all
    instants in order, and for each of ``values`` what holds at them behind the last of those that are equal."""
    changes = [change for change, _ in values]
    instants = np.concatenate([*changes, others])
    order = np.argsort(instants, kind="stable")
    origin = np.repeat(np.arange(len(values) + 1), [*map(len, changes), len(others)])[order]
    places = (np.cumsum(origin == number) - 1 for number in range(len(values)))
    return instants[order], [held[place] for (_, held), place in zip(values, places, strict=True)]


def _innermost(
    ranges: Sequence[Range], calls: Sequence[Call], names: _Numbers
) -> tuple[_Integers, _Integers]:
    """When the innermost range or call of the host changes, in order, and which part it is from then on."""
    entered = [entry.name for entry in ranges]
    labels = {name: names[NO_WORK if name == SLEEP else f"host {name}"] for name in dict.fromkeys(entered)}
    launch, wait, unnamed = names[LAUNCH], names[WAIT], names[UNNAMED]
    waits = [call for call in calls if call.waited]
    wait_ends = _column(waits, "end")
    starts = np.concatenate(
        [_column(ranges, "start"), _column(calls, "start"), wait_ends - _column(waits, "waited")]
    )
    ends = np.concatenate([_column(ranges, "end"), _column(calls, "end"), wait_ends])
    parts = np.array(
        [*map(labels.__getitem__, entered), *[launch] * len(calls), *[wait] * len(waits)], np.int64
    )
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


class _PathParts(NamedTuple):
    """The parts of the path and their starts, the latest first. Each ends where the one before it starts."""

    starts: list[int]
    parts: list[str]


class _Path:
    """Follows the records backwards. An operation's number is its place in the order of ends."""

    def __init__(
        self, ops: Sequence[Op], held: set[tuple[int, int]], calls: Sequence[Call], sync_return: int
    ) -> None:
        start, end = _column(ops, "start"), _column(ops, "end")
        order = np.lexsort((start, end))
        self._ops = [ops[number] for number in order.tolist()]
        start, end = start[order], end[order]
        self._ends = end.tolist()
        self._causes, self._cause_times = _causes(
            _column(self._ops, "stream"), start, end, _column(self._ops, "launched")
        )
        # Calls that waited for an operation, not for another rank.
        self._waits = sorted((c for c in calls if c.waited and c.kind != "link"), key=attrgetter("end"))
        self._wait_starts = [call.end - call.waited for call in self._waits]
        self._held = held
        self._sync_return = sync_return

    def back(self, last: int, first: int) -> _PathParts:
        """What bounds the time from ``first`` to ``last``."""
        starts, parts = list[int](), list[str]()
        now, at = last, self._ended_at(last)
        while now > first:
            if at == _BY_HOST:
                now, at = self._on_host(now, first)
                starts.append(now)
                parts.append(_HOST)
                continue
            op = self._ops[at]
            begin = op.start
            starts.append(begin)
            parts.append(KERNEL if op.kind == "kernel" else COPY)
            now, at = self._cause_times[at], self._causes[at]
            if now < begin:
                held = at == _BY_HOST or (op.stream, begin) in self._held
                starts.append(now)
                parts.append(WAIT if held else GAP)
        return _PathParts(starts, parts)

    def _ended_at(self, instant: int, *, stream: int | None = None) -> int:
        """The last operation that ended at that instant, on ``stream`` if one did there."""
        last = at = bisect_right(self._ends, instant) - 1
        while at >= 0 and self._ends[at] == instant:
            if stream is None or self._ops[at].stream == stream:
                return at
            at -= 1
        return _BY_HOST if at == last else last

    def _on_host(self, now: int, first: int) -> tuple[int, int]:
        """The end and number of the last operation that the host waited for before ``now``, or else ``first``."""
        for number in range(bisect_left(self._wait_starts, now) - 1, -1, -1):
            call = self._waits[number]
            if call.end <= first:
                break
            for instant in (call.end, call.end - self._sync_return):
                if call.end - call.waited < instant <= now:
                    at = self._ended_at(instant, stream=call.stream)
                    if at != _BY_HOST:
                        return instant, at
        return first, _BY_HOST


def _causes(
    stream: _Integers, start: _Integers, end: _Integers, launched: _Integers
) -> tuple[list[int], list[int]]:
    """Of each operation, in the order of ends: the number of what it could not start without, and when that was done.
    The host, and what is not on this device, is _BY_HOST."""
    number = np.arange(len(start))
    by_stream = np.argsort(stream, kind="stable")
    before = np.full(len(start), _BY_HOST)  # the operation before each on its stream
    before[by_stream[1:]] = np.where(np.diff(stream[by_stream]), _BY_HOST, by_stream[:-1])
    # The last one that ended at the start, if one did.
    other = np.minimum(np.searchsorted(end, start, side="right"), number) - 1
    ended_there = (other >= 0) & (end[other] == start)
    follows = (before >= 0) & (end[before] == start)
    unordered = (before < 0) | (end[before] <= launched)
    cases = [launched >= start, follows, ended_there, unordered]
    causes = np.select(cases, [_BY_HOST, before, other, _BY_HOST], before)
    times = np.select(cases, [start, start, start, launched], end[before])
    return causes.tolist(), times.tolist()
