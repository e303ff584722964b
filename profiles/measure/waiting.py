"""Idle time of the GPU: between forwards with its causes, the exposed part of the host's waits, and on pipeline stages.

Between two spans of forward kernels lies forward idle::

    last forward kernel ends                          next forward kernel starts
    |<------------------------- forward idle ------------------------->|
    |  host asleep  |  stalled  |  working  | held     | launch latency |
    |   no work     |<----- exposed ------->| dependency, other kernels |
                                            ^ its first op is enqueued

When the op was enqueued before the idle began, the host did not cause it: time in which the op was not held is a kernel
gap.

Sleeps, stalls and work are measured on records of their own: ranges called sleep, the waits of calls, and all other
ranges with the calls between them. Host time without a record is unnamed work, since the host has one thread; time
that two records claim is the residue. After the enqueue, launch latency and kernel gap are the time in which nothing
held the op.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import not_
from typing import Final, Literal, NamedTuple, get_args

from ...sched.observe import SLEEP, StepInfo
from ..record.timeline import Call, Op, Range, Records, Window
from .distribution import Distribution
from .intervals import IntervalTrack, IntervalUnion, covered, partition
from .steps import PARTS, StepGate, StepPeriod

WAITING_LAG: Final = 4  # later steps that have settled when the records of a step are complete
Cause = Literal[
    "exposed_stall", "exposed_host", "launch_latency", "dependency", "kernel_gap", "no_work"
]  # fields of Waiting
CAUSES: Final = get_args(Cause)


class Waiting(NamedTuple):
    """Totals in ns over the forward window: first to last forward kernel of the run."""

    steps: int = 0  # that ran forward kernels; a verify's drafts are no steps of the loop
    window: int = 0
    forward: int = 0  # union of step spans
    inside: int = 0  # of it, without a forward kernel
    busy: int = 0  # union of kernels of every stream
    stall: int = 0  # host time inside calls that wait, whole run
    exposed_stall: int = 0
    exposed_host: int = 0
    unnamed_host: int = 0  # of exposed_host, outside any range or call
    launch_latency: int = 0
    dependency: int = 0
    kernel_gap: int = 0
    no_work: int = 0

    @property
    def idle(self) -> int:
        return self.window - self.forward

    @property
    def host_late(self) -> int:
        return self.exposed_stall + self.exposed_host + self.launch_latency

    @property
    def residue(self) -> int:
        """Idle time minus its parts; below 0 where records contradict each other, such as a stall during sleep."""
        return self.idle - self.host_late - self.dependency - self.kernel_gap - self.no_work


class IdlePiece(NamedTuple):
    """A stretch of forward idle in front of a step, ns. Time that two records claim counts as sleep rather than as a
    stall; ``Waiting`` counts it twice and has a residue."""

    start: int
    end: int
    cause: Cause
    step: int


# First to last forward kernel of one step, and when and where the first one was enqueued.
_StepSpan = list[int]  # start, end, launched, stream


class _Forward(NamedTuple):
    """The forward of a step whose records are complete. ``requests``: the size of its batch."""

    span: _StepSpan
    step: int
    kind: str
    requests: int


def _began(forward: _Forward) -> int:
    return forward.span[0]


class WaitingSink:
    """Folds windows into ``Waiting``, and computes the exposed part of each waiting call. ``note`` receives the pieces
    of the idle time in the order of time."""

    def __init__(self, note: Callable[[IdlePiece], None] | None = None) -> None:
        self._note = note
        self._gate = StepGate(WAITING_LAG)
        self._spans: dict[int, _StepSpan] = {}  # of steps that are not complete
        self._complete: list[_Forward] = []  # of complete steps that are not folded yet
        self._origin: int | None = None
        self._cursor = 0  # end of the spans folded so far
        self.forwards: defaultdict[str, Distribution] = defaultdict(Distribution)  # spans by kind of step, ns
        self.requests: defaultdict[str, int] = defaultdict(int)  # of all those steps' batches, by kind
        self.idle = Distribution()  # in front of each step but the first, without sleep, ns
        self._sleeps: IntervalTrack[str] = IntervalTrack()
        self._work: IntervalTrack[str] = IntervalTrack()
        self._stalls: IntervalTrack[int] = IntervalTrack()
        self._waits: IntervalTrack[int] = IntervalTrack()
        # Ops that can hold a forward op: (kernel?, stream).
        self._others: IntervalTrack[tuple[bool, int]] = IntervalTrack()
        self._kernels = IntervalUnion()
        self._forward_kernels = IntervalUnion()
        self._totals: defaultdict[str, int] = defaultdict(int)
        self._exposed: defaultdict[int, int] = defaultdict(int)
        self._periods: list[StepPeriod] = []

    def feed(self, window: Window) -> None:
        """Raises TimelineError if a forward kernel arrives after its step is complete."""
        self._take_ops(window.ops)
        self._take_calls(window.calls)
        self._waits.add([(wait.start, wait.end, wait.stream) for wait in window.waits])
        of = Records.of(Range, window.ranges).columns
        spans = [*zip(of.start, of.end, of.name, strict=True)]
        self._sleeps.add([span for span in spans if span[2] == SLEEP] if SLEEP in of.name else ())
        self._work.add([span for span in spans if span[2] != SLEEP] if SLEEP in of.name else spans)
        self._gate.reject_late(self._spans, what="a forward kernel")
        self._take_complete(self._gate.feed(window))
        self._fold_ordered()
        self._settle_kernels()
        for track in (self._sleeps, self._work, self._stalls, self._waits, self._others):
            track.forget(self._cursor)

    def finish(self) -> Waiting:
        """Totals of the run; nothing may be fed afterwards. A forward whose step was never launched does not count."""
        self._take_complete(self._gate.finish())
        self._spans.clear()
        self._fold_ordered()
        self._settle_kernels()
        origin = self._cursor if self._origin is None else self._origin
        return Waiting(
            window=self._cursor - origin,
            busy=self._kernels.length,
            inside=self._totals["forward"] - self._forward_kernels.length,
            **self._totals,
        )

    def take_exposed(self, call: Call) -> int:
        """Exposed part of a call's stall, ns; available once, after the spans around it were folded."""
        return self._exposed.pop(call.end, 0)

    def take_periods(self) -> list[StepPeriod]:
        """The periods of the steps since the last call, which leave out no time of the forward window."""
        taken, self._periods = self._periods, []
        return taken

    def _take_ops(self, ops: Sequence[Op]) -> None:
        of = Records.of(Op, ops).columns
        kernel = [kind == "kernel" for kind in of.kind]
        described = zip(kernel, of.forward, of.step, strict=True)
        forward = [is_kernel and inside and step >= 0 for is_kernel, inside, step in described]
        spans = self._spans
        fields = zip(of.step, of.start, of.end, of.launched, of.stream, strict=True)
        for step, start, end, launched, stream in compress(fields, forward):
            span = spans.get(step)
            if span is None or start < span[0]:
                spans[step] = [start, end if span is None else max(end, span[1]), launched, stream]
            elif end > span[1]:
                span[1] = end
        others = zip(of.start, of.end, zip(kernel, of.stream, strict=True), strict=True)
        self._others.add(compress(others, map(not_, forward)))
        times = [*zip(of.start, of.end, strict=True)]
        self._forward_kernels.add(compress(times, forward))
        self._kernels.add(compress(times, kernel))

    def _take_calls(self, calls: Sequence[Call]) -> None:
        of = Records.of(Call, calls).columns
        stalls = [(end - waited, end, end) for end, waited in zip(of.end, of.waited, strict=True) if waited]
        self._totals["stall"] += sum(of.waited)
        self._stalls.add(stalls)
        outside = zip(of.start, of.end, of.name, of.range, strict=True)
        self._work.add([(start, end, name) for start, end, name, where in outside if not where])

    def _take_complete(self, infos: Iterable[StepInfo]) -> None:
        for info in infos:
            span = self._spans.pop(info.step, None)
            if span is not None:
                self._complete.append(_Forward(span, info.step, info.kind, info.batch_size))

    def _fold_ordered(self) -> None:
        """Folds forwards in the order of their starts, up to that of a step that is not complete: a decode may begin
        before the prompt beside it that has the lower number."""
        self._complete.sort(key=_began)
        open_from = [span[0] for span in self._spans.values()]
        ready = len(self._complete)
        if open_from:
            ready = bisect_right(self._complete, min(open_from), key=_began)
        folded, self._complete = self._complete[:ready], self._complete[ready:]
        for forward in folded:
            self._fold(forward)

    def _fold(self, forward: _Forward) -> None:
        span, step, kind, requests = forward
        first, last, _, _ = span
        if self._origin is None:
            self._origin = self._cursor = first
        else:
            self.idle.add(self._split_idle(span, step) if first > self._cursor else 0)
        reached = max(last, self._cursor)
        self._totals["forward"] += reached - max(first, self._cursor)
        self._periods.append(StepPeriod(kind, self._cursor, reached))
        self._cursor = reached
        self._totals["steps"] += kind not in PARTS
        self.forwards[kind].add(last - first)
        self.requests[kind] += requests

    def _split_idle(self, span: _StepSpan, step: int) -> int:
        """The idle from the cursor to the span's start, split at the instant its first op was enqueued. Returns the
        part in which the scheduler did not sleep."""
        end, _, launched, stream = span
        begin = self._cursor
        enqueued = min(max(launched, begin), end)
        asleep, stalled = self._split_host(begin, enqueued)
        holders = self._holders(stream, start=enqueued, end=end)
        held = covered(holders)
        unheld: Cause = "launch_latency" if enqueued > begin else "kernel_gap"
        self._totals["dependency"] += held
        self._totals[unheld] += end - enqueued - held
        if self._note is not None:
            host: dict[Cause, list[tuple[int, int]]] = {"no_work": asleep, "exposed_stall": stalled}
            late: Iterator[tuple[int, int, Cause]] = partition(begin, enqueued, host, "exposed_host")
            device: dict[Cause, list[tuple[int, int]]] = {"dependency": holders}
            for low, high, cause in (*late, *partition(enqueued, end, device, unheld)):
                self._note(IdlePiece(low, high, cause, step))
        return end - begin - covered(asleep)

    def _split_host(self, begin: int, enqueued: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Splits the time of the host into sleep, stall and work, named or not. Returns the sleeps and the stalls."""
        if begin == enqueued:
            return [], []
        stalled = self._stalls.overlaps(begin, enqueued)
        for lo, hi, call_end in stalled:
            self._exposed[call_end] += hi - lo
        waiting = [(lo, hi) for lo, hi, _ in stalled]
        asleep = [(lo, hi) for lo, hi, _ in self._sleeps.overlaps(begin, enqueued)]
        work = [(lo, hi) for lo, hi, _ in self._work.overlaps(begin, enqueued)]
        totals = self._totals
        totals["no_work"] += covered(asleep)
        totals["exposed_stall"] += covered(waiting)
        totals["exposed_host"] += enqueued - begin - covered(waiting + asleep)
        totals["unnamed_host"] += enqueued - begin - covered(work + waiting + asleep)
        return asleep, waiting

    def _holders(self, stream: int, *, start: int, end: int) -> list[tuple[int, int]]:
        """Times in [start, end) in which an op of ``stream`` waits for an event, for its own stream, or
        for a kernel of another stream."""
        if start >= end:
            return []
        holders = [(lo, hi) for lo, hi, held in self._waits.overlaps(start, end) if held == stream]
        for lo, hi, (kernel, on) in self._others.overlaps(start, end):
            if kernel or on == stream:
                holders.append((lo, hi))
        return holders

    def _settle_kernels(self) -> None:
        if self._origin is not None:
            self._kernels.settle(self._origin, self._cursor)
            self._forward_kernels.settle(self._origin, self._cursor)


TURN = "turn"  # a range of the pipelined loop, whose size is the place of the microbatch
OUTSIDE_TURNS = -1


class StageTime(NamedTuple):
    """Times in ns. ``idle`` is by the place of the microbatch whose kernel ended it, or OUTSIDE_TURNS."""

    first: int
    last: int
    busy: int
    idle: dict[int, int]


class BubbleSink:
    """Idle time of the device of a pipeline stage, by the microbatch that it waited for. Takes windows in time order::

    kernels   |-- mb 0 --|     |-- mb 1 --|-- mb 1 --|  |-- mb 0 --|
    idle                  mb 1                        mb 0
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._end = 0
        self._busy = 0
        self._idle: Counter[int] = Counter()
        self._places: dict[int, int] = {}

    def feed(self, window: Window) -> None:
        self._places.update((entry.step, entry.size) for entry in window.ranges if entry.name == TURN)
        for op in sorted((op for op in window.ops if op.kind == "kernel"), key=lambda op: op.start):
            if self._first is None:
                self._first = self._end = op.start
            if op.start > self._end:
                self._idle[self._places.get(op.step, OUTSIDE_TURNS)] += op.start - self._end
            self._busy += max(0, op.end - max(op.start, self._end))
            self._end = max(self._end, op.end)

    def found(self) -> StageTime | None:
        """None where no kernel ran."""
        if self._first is None:
            return None
        return StageTime(self._first, self._end, self._busy, dict(self._idle))


def bubble(stages: list[StageTime]) -> float:
    """Percent: 1 - sum of busy times / (stages x window), where the window spans all stages."""
    window = max(stage.last for stage in stages) - min(stage.first for stage in stages)
    return 100 * (1 - sum(stage.busy for stage in stages) / (len(stages) * window)) if window else 0.0
