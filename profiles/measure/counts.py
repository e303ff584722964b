"""Copies, syncs and kernels of a step: by step kind and stream, in total and by source line."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final, NamedTuple

from ...sched.observe import StepInfo
from ..record.timeline import Call, Op, Window
from .lines import LineTotals
from .steps import OUTSIDE, StepGate, labels

LAG: Final = 8  # more than the waiting sink's, whose exposures are taken when a step is folded
_COPIES: Final = frozenset(("h2d", "d2h", "d2d"))
_key = attrgetter("step", "stream", "kind")


class CounterKey(NamedTuple):
    """What is counted per step. ``counter`` is an op's kind or ``sync``, or a copy's direction with its
    host memory or ``blocking``, as in ``h2d_pageable``."""

    kind: str
    stream: int
    counter: str


class CountsPerStep(NamedTuple):
    """Counts per step over all steps of a kind, those without any included."""

    median: float
    mean: float
    max: int
    steps_with: int


class _Pending:
    """Records of a step that is not complete yet."""

    __slots__ = ("calls", "copies", "counts")

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()
        self.copies: list[Op] = []
        self.calls: list[Call] = []


class CountsSink:
    """Folds windows into counts per step. Must be fed after the sink that computes ``exposed``."""

    def __init__(self, exposed: Callable[[Call], int]) -> None:
        self.lines = LineTotals(exposed)
        self.steps: Counter[str] = Counter()
        self._gate = StepGate(LAG)
        self._pending: defaultdict[int, _Pending] = defaultdict(_Pending)
        self._outside: deque[tuple[int, _Pending]] = deque()  # folded once the step named has passed
        self._newest = -1
        self._seen: defaultdict[CounterKey, Counter[int]] = defaultdict(Counter)

    def feed(self, window: Window) -> None:
        """Raises TimelineError if a copy, sync or kernel arrives after its step is complete."""
        pending = self._pending
        for (step, stream, kind), count in Counter(map(_key, window.ops)).items():
            pending[step].counts[stream, kind] += count
        for op in window.ops:
            if op.kernels > 1:
                pending[op.step].counts[op.stream, op.kind] += op.kernels - 1
            if op.kind in _COPIES or op.host_bytes:
                self._take_copy(op)
        for call in window.calls:
            if call.waited or call.kind == "sync" or call.kind == "copy":
                self._take_call(call)
        self._newest = max((info.step for info in window.launched), default=self._newest)
        self._gate.reject_late(pending, what="a record")
        self._fold(self._gate.feed(window))
        self._fold_outside()

    def finish(self) -> None:
        """Folds everything that is left. Nothing may be fed afterwards."""
        self._fold(self._gate.finish())
        for entry in (*(entry for _, entry in self._outside), *self._pending.values()):
            self.lines.fold(OUTSIDE, entry.copies, entry.calls)

    def tallies(self) -> dict[CounterKey, CountsPerStep]:
        return {place: _tally(seen, self.steps[place.kind]) for place, seen in sorted(self._seen.items())}

    def _take_copy(self, op: Op) -> None:
        entry = self._pending[op.step]
        entry.copies.append(op)
        if op.kind in _COPIES:
            if op.host_memory:
                entry.counts[op.stream, f"{op.kind}_{op.host_memory}"] += 1
            if op.blocking:
                entry.counts[op.stream, f"{op.kind}_blocking"] += 1

    def _take_call(self, call: Call) -> None:
        entry = self._pending[call.step]
        entry.calls.append(call)
        if call.kind == "sync":
            entry.counts[call.stream, "sync"] += 1

    def _fold(self, complete: Iterable[StepInfo]) -> None:
        for info in complete:
            kinds = labels(info)
            self.steps.update(kinds)
            entry = self._pending.pop(info.step, None)
            if entry is not None:
                for (stream, counter), count in entry.counts.items():
                    for kind in kinds:
                        self._seen[CounterKey(kind, stream, counter)][count] += 1
                self.lines.fold(kinds[-1], entry.copies, entry.calls)

    def _fold_outside(self) -> None:
        """Folds records of no step, or of a step that was passed over, which count for no kind of step."""
        pending, passed = self._pending, self._gate.passed
        for step in [step for step in pending if step < 0]:
            self._outside.append((self._newest, pending.pop(step)))
        for step in [step for step in pending if step <= passed]:
            self._outside.append((step, pending.pop(step)))
        while self._outside and self._outside[0][0] <= passed:
            _, entry = self._outside.popleft()
            self.lines.fold(OUTSIDE, entry.copies, entry.calls)


def _tally(seen: Counter[int], steps: int) -> CountsPerStep:
    """Median, mean and max over ``steps`` steps of which those in ``seen`` had any."""
    steps_with = seen.total()
    ordered = sorted(seen.items())
    if steps > steps_with:
        ordered.insert(0, (0, steps - steps_with))
    low, high = _at(ordered, (steps - 1) // 2), _at(ordered, steps // 2)
    mean = sum(count * times for count, times in ordered) / steps
    return CountsPerStep(median=(low + high) / 2, mean=mean, max=ordered[-1][0], steps_with=steps_with)


def _at(ordered: list[tuple[int, int]], rank: int) -> int:
    """The value at ``rank`` (from 0) of a sorted multiset of (value, times)."""
    for value, times in ordered:
        rank -= times
        if rank < 0:
            return value
    raise IndexError(rank)
