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
from collections.abc import Generator, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from ...sched.observe import SLEEP
from ..record.timeline import Call, Op, Range, Window
from .steps import StepPeriod

KERNEL, COPY, LAUNCH, WAIT, GAP, NO_WORK, UNNAMED = (
    "kernels", "copies", "launches", "waits", "gaps", "no work", "host in no range",
)  # fmt: skip
_CHUNK: Final = 64  # steps whose records are followed at once
_AHEAD: Final = 16  # later steps from which the path comes


class PathTimes:
    """``parts`` in ns, which add up to the time of all ``steps`` of a kind. Those of the host have the names of their
    innermost ranges."""

    def __init__(self) -> None:
        self.steps = 0
        self.parts: Counter[str] = Counter()


# Start, end and part, of the path or of the host's time, and the call that waits meanwhile. A run has many of them,
# and a NamedTuple takes several times as long to make.
_Piece = tuple[int, int, str, Call | None]


class _Jump(NamedTuple):
    """The path goes on at ``now``: at the end of operation number ``at``, or on the host."""

    now: int
    at: int | None


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
        self._ranges += window.ranges
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
        path = _Path(self._ops, self._held, _pieces(self._ranges, self._calls), self._sync_return)
        self._attribute(done, path.back(last, done[0].start))
        reached = done[-1].end
        self._ops = [op for op in self._ops if op.end >= reached]
        self._calls = [call for call in self._calls if call.end > reached]
        self._ranges = [entry for entry in self._ranges if entry.end > reached]
        self._held = {(stream, end) for stream, end in self._held if end >= reached}

    def _attribute(self, periods: Sequence[StepPeriod], pieces: Iterable[_Piece]) -> None:
        """Both in reverse order; ``pieces`` begin at or behind the end of the last period, and leave no instant out."""
        left = list(periods)
        for start, end, part, _ in pieces:
            while left and end > left[-1].start:
                period = left[-1]
                times = self.kinds[period.kind]
                if start > period.start:
                    times.parts[part] += max(min(end, period.end) - start, 0)
                    break
                times.parts[part] += max(min(end, period.end) - period.start, 0)
                times.steps += 1
                left.pop()


class _Path:
    """Follows the records backwards. An operation's number is its place in the order of ends."""

    def __init__(
        self, ops: Sequence[Op], held: set[tuple[int, int]], host: list[_Piece], sync_return: int
    ) -> None:
        self._ops = sorted(ops, key=attrgetter("end", "start"))
        self._ends = [op.end for op in self._ops]
        self._host = host
        self._host_starts = [start for start, *_ in host]
        self._held = held
        self._sync_return = sync_return

    def back(self, last: int, first: int) -> Iterator[_Piece]:
        """What bounds the time from ``first`` to ``last``, the latest part first."""
        jump = _Jump(last, self._ended_at(last, len(self._ops)))
        while jump.now > first:
            now, at = jump
            jump = yield from self._on_host(now, first) if at is None else self._on_device(at)

    def _on_device(self, at: int) -> Generator[_Piece, None, _Jump]:
        """The operation, and the gap before it if there is one."""
        op = self._ops[at]
        yield op.start, op.end, KERNEL if op.kind == "kernel" else COPY, None
        if op.launched >= op.start:
            return _Jump(op.start, None)
        before = self._ended_at(op.start, at, op.stream)
        if before is None:
            before = self._last_on(op.stream, at, after=op.launched)
        if before is None:  # it waited for something that is not on this device
            yield op.launched, op.start, WAIT, None
            return _Jump(op.launched, None)
        end = self._ends[before]
        if end < op.start:
            yield end, op.start, WAIT if (op.stream, op.start) in self._held else GAP, None
        return _Jump(end, before)

    def _ended_at(self, instant: int, below: int, stream: int | None = None) -> int | None:
        """The last number below ``below`` of an operation that ended at that instant, on ``stream`` if there is one."""
        last = at = min(bisect_right(self._ends, instant), below) - 1
        while at >= 0 and self._ends[at] == instant:
            if stream is None or self._ops[at].stream == stream:
                return at
            at -= 1
        return None if at == last else last

    def _last_on(self, stream: int, below: int, *, after: int) -> int | None:
        """The last operation of the stream before number ``below`` that ended later than ``after``."""
        for at in range(below - 1, -1, -1):
            if self._ends[at] <= after:
                return None
            if self._ops[at].stream == stream:
                return at
        return None

    def _on_host(self, now: int, first: int) -> Generator[_Piece, None, _Jump]:
        """The host's time back to a call that waited for an operation, or to ``first``."""
        number = bisect_left(self._host_starts, now) - 1
        while now > first:
            start, end, part, call = self._host[number] if number >= 0 else (0, first, UNNAMED, None)
            if end < now:
                yield end, now, UNNAMED, None
                now = end
            at = None if call is None else self._awaited(call, now)
            start = start if at is None else self._ends[at]
            if start < now:
                yield start, now, part, None
            now, number = start, number - 1
            if at is not None:
                return _Jump(now, at)
        return _Jump(now, None)

    def _awaited(self, call: Call, now: int) -> int | None:
        """The number of the operation whose end the call waited for; None where that is another rank."""
        for instant in () if call.kind == "link" else (call.end, call.end - self._sync_return):
            if call.end - call.waited < instant <= now:
                at = self._ended_at(instant, len(self._ops), call.stream)
                if at is not None:
                    return at
        return None


_Entry = tuple[int, int, str, Call | None]  # start, end below 0 so that the outer one comes first, part, call


def _pieces(ranges: Sequence[Range], calls: Sequence[Call]) -> list[_Piece]:
    """The host's time by the innermost range or call, in order."""
    entries: list[_Entry] = [
        (entry.start, -entry.end, NO_WORK if entry.name == SLEEP else f"host {entry.name}", None)
        for entry in ranges
    ]
    entries += [(call.start, call.waited - call.end, LAUNCH, None) for call in calls]
    entries += [(call.end - call.waited, -call.end, WAIT, call) for call in calls if call.waited]
    found: list[_Piece] = []
    stack: list[_Entry] = []
    reached = 0

    def close(until: int) -> None:
        nonlocal reached
        if until > reached:
            found.append((reached, until, stack[-1][2], stack[-1][3]))
            reached = until

    for entry in sorted(entries):
        while stack and -stack[-1][1] <= entry[0]:
            close(-stack[-1][1])
            stack.pop()
        if stack:
            close(entry[0])
        reached = max(reached, entry[0])
        stack.append(entry)
    while stack:
        close(-stack[-1][1])
        stack.pop()
    return found
