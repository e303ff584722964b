"""The critical path: what bounds the time of each kind of step on the virtual GPU.

The time of a step is from the end of the forwards that began before its own to the end of its own, so that the steps of
a run add up to its forward window. A step whose forward ends within that of another one has no time, but it counts as
a step. The path covers every instant of the window once. It is followed backwards from the end of the last forward,
always to what the present part could not start without::

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

import struct
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

import numpy as np

from ...sched.observe import SLEEP
from ..record.timeline import Call, Op, Range, Records, Window
from .steps import StepPeriod

KERNEL, COPY, LAUNCH, WAIT, GAP, NO_WORK, UNNAMED = (
    "kernels", "copies", "launches", "waits", "gaps", "no work", "host in no range",
)  # fmt: skip
_HOST: Final = "host"  # part of the path that the host's ranges and calls split further
_CHUNK: Final = 64  # steps whose records are followed at once
_AHEAD: Final = 16  # later steps from which the path comes


_BY_HOST: Final = -1  # in place of the number of an operation
_OP_FIELDS: Final = ("stream", "start", "end", "launched")
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_Changes: TypeAlias = tuple[Integers, Integers]  # instants in order, and what holds from each on


def integers(*columns: Sequence[int]) -> Integers:
    """The columns as an array, packed first: NumPy takes four times as long to read Python's integers."""
    packed = b"".join([struct.pack(f"{len(column)}q", *column) for column in columns])
    return np.ndarray((len(columns), len(columns[0])), np.int64, packed)


class CriticalPathSink:
    """Folds windows and the periods of steps into ``steps``, the number of each kind, and ``parts`` in ns, which add up
    to the time of all steps of the kind. Those of the host have the names of their innermost ranges. ``sync_return``:
    from the end of what a sync waits for to its return, ns."""

    def __init__(self, sync_return: int) -> None:
        self.steps: Counter[str] = Counter()
        self.parts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._sync_return = sync_return
        self._names = _Numbers()
        self._numbers = self._names.of((_HOST, KERNEL, COPY, WAIT, GAP)).tolist()
        # Columns of records: operations with _OP_FIELDS and their part, ranges with start, end and part, calls with
        # start and end.
        self._ops: list[Integers] = [np.empty((len(_OP_FIELDS) + 1, 0), np.int64)]
        self._ranges: list[Integers] = [np.empty((3, 0), np.int64)]
        self._calls: list[Integers] = [np.empty((2, 0), np.int64)]
        self._waits: list[Call] = []  # calls that waited
        self._held: set[tuple[int, int]] = set()  # stream, and when an event let it go on
        self._periods: list[StepPeriod] = []

    def feed(self, window: Window, periods: Sequence[StepPeriod]) -> None:
        """``periods``: of the steps that the window completes, in order."""
        _, kernel, copy, _, _ = self._numbers
        made = Records.of(Call, window.calls)
        ops, calls = Records.of(Op, window.ops).columns, made.columns
        ranges = Records.of(Range, window.ranges).columns
        kinds = [kernel if kind == "kernel" else copy for kind in ops.kind]
        self._ops.append(integers(ops.stream, ops.start, ops.end, ops.launched, kinds))
        labels = {
            name: self._names[NO_WORK if name == SLEEP else f"host {name}"]
            for name in dict.fromkeys(ranges.name)
        }
        named = [labels[name] for name in ranges.name]
        self._ranges.append(_lasting(integers(ranges.start, ranges.end, named)))
        self._calls.append(_lasting(integers(calls.start, calls.end)))
        self._waits += made.at([place for place, waited in enumerate(calls.waited) if waited])
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
        ops, ranges, calls = (np.concatenate(kept, 1) for kept in (self._ops, self._ranges, self._calls))
        ops = ops[:, np.lexsort((ops[1], ops[2]))]
        path = _Path(ops, self._held, self._waits, self._sync_return).back(last, done[0].start, self._numbers)
        self._attribute(done, [path, _innermost(ranges, calls, self._waits, self._names)], last)
        reached = done[-1].end
        self._ops = [ops[:, ops[2] >= reached]]
        self._ranges = [ranges[:, ranges[1] > reached]]
        self._calls = [calls[:, calls[1] > reached]]
        self._waits = [call for call in self._waits if call.end > reached]
        self._held = {(stream, end) for stream, end in self._held if end >= reached}

    def _attribute(self, periods: Sequence[StepPeriod], parts: Sequence[_Changes], last: int) -> None:
        """Cut time where the path, the host's work or the period changes, and add up the cuts by kind and part.
        ``parts`` are of the path, and of the host. The path ends at ``last``, at or behind the end of the last period,
        and leaves no instant out."""
        kinds, names = _Numbers(), self._names
        kind = [period.kind for period in periods]
        end = periods[-1].end
        [starts] = integers([period.start for period in periods])
        cuts, (kind_of, path_part, host_part) = _merged([(starts, kinds.of(kind)), *parts], [end, last])
        inside = np.flatnonzero((cuts[:-1] >= periods[0].start) & (np.diff(cuts) > 0) & (cuts[:-1] < last))
        part = np.where(path_part == names[_HOST], host_part, path_part)[inside]
        place = kind_of[inside] * len(names) + part
        cuts = np.minimum(cuts, end)
        # In float64, which is exact: a run takes less than 2**53 ns.
        times = np.bincount(place, cuts[inside + 1] - cuts[inside])
        self.steps.update(kind)
        newest = np.full(len(times), -1)
        newest[place] = np.arange(len(place))
        for number in np.argsort(-newest, kind="stable")[: np.count_nonzero(newest >= 0)].tolist():
            at_kind, at_name = divmod(number, len(names))
            self.parts[[*kinds][at_kind]][[*names][at_name]] += int(times[number])


class _Numbers(dict[str, int]):
    """Numbers of names, in the order of their first use."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number

    def of(self, names: Iterable[str]) -> Integers:
        return np.array([self[name] for name in names], np.int64)


def _lasting(records: Integers) -> Integers:
    """Those of the columns ``records``, which begin with start and end, that took any time."""
    return records[:, records[1] > records[0]]


def _merged(values: Sequence[_Changes], others: Sequence[int]) -> tuple[Integers, list[Integers]]:
    """Merge the instants of all ``values``, each with the value that holds from it on, and ``others``. Returns all
    instants in order, and for each of ``values`` what holds at them behind the last of those that are equal."""
    changes = [change for change, _ in values]
    instants = np.concatenate([*changes, others])
    order = np.argsort(instants, kind="stable")
    origin = np.repeat(np.arange(len(values) + 1), [*map(len, changes), len(others)])[order]
    places = (np.cumsum(origin == number) - 1 for number in range(len(values)))
    return instants[order], [held[place] for (_, held), place in zip(values, places, strict=True)]


def _innermost(ranges: Integers, calls: Integers, waits: Sequence[Call], names: _Numbers) -> _Changes:
    """When the innermost range or call of the host changes, in order, and which part it is from then on."""
    launch, wait, unnamed = names[LAUNCH], names[WAIT], names[UNNAMED]
    wait_ends, waited = integers([call.end for call in waits], [call.waited for call in waits])
    starts = np.concatenate([ranges[0], calls[0], wait_ends - waited])
    ends = np.concatenate([ranges[1], calls[1], wait_ends])
    parts = np.concatenate([ranges[2], np.full(calls.shape[1], launch), np.full(len(waits), wait)])
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
    """Follows the records backwards. ``ops``: the columns of operations in the order of their ends; an operation's
    number is its place there."""

    def __init__(
        self, ops: Integers, held: set[tuple[int, int]], waits: Sequence[Call], sync_return: int
    ) -> None:
        stream, start, end, launched, _ = self._ops = ops
        self._streams, self._ends = stream.tolist(), end.tolist()
        self._causes, self._cause_times = _causes(stream, start, end, launched)
        # Calls that waited for an operation, not for another rank.
        self._waits = sorted((call for call in waits if call.kind != "link"), key=attrgetter("end"))
        self._wait_starts = [call.end - call.waited for call in self._waits]
        self._held = held
        self._sync_return = sync_return

    def back(self, last: int, first: int, numbers: Sequence[int]) -> _Changes:
        """When what bounds the time from ``first`` to ``last`` changes, in order, and which part it is from then on.
        ``numbers``: of the host, kernels, copies, waits and gaps."""
        causes, times = self._causes.tolist(), self._cause_times.tolist()
        followed, reached = list[int](), list[int]()
        now, at = last, self._ended_at(last)
        while now > first:
            followed.append(at)
            if at == _BY_HOST:
                now, at = self._on_host(now, first)
            else:
                now, at = times[at], causes[at]
            reached.append(now)
        host, _, _, wait, gap = numbers
        by_host = [[0], [0], [0], [0], [host]]  # the last column, which _BY_HOST is the place of
        place, before = np.array(followed[::-1], np.int64), np.array(reached[::-1], np.int64)
        stream, start, _, _, part = np.append(self._ops, by_host, 1)[:, place]
        start = np.where(place == _BY_HOST, before, start)
        late = np.flatnonzero(before < start)
        held = np.fromiter(
            map(self._held.__contains__, zip(stream[late].tolist(), start[late].tolist(), strict=True)),
            bool,
            len(late),
        )
        between = np.where(held | (self._causes[place[late]] == _BY_HOST), wait, gap)
        return np.insert(start, late, before[late]), np.insert(part, late, between)

    def _ended_at(self, instant: int, *, stream: int | None = None) -> int:
        """The last operation that ended at that instant, on ``stream`` if one did there."""
        last = at = bisect_right(self._ends, instant) - 1
        while at >= 0 and self._ends[at] == instant:
            if stream is None or self._streams[at] == stream:
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
    stream: Integers, start: Integers, end: Integers, launched: Integers
) -> tuple[Integers, Integers]:
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
    return causes, times
