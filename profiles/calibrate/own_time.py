"""A phase's own time: its range without the phases inside it and without its device calls.

A hardware profile's phases are charged in the same way. A range that is no phase belongs to the enclosing phase::

    settle  |----- own -----|  copy  |--- own ---| sync, 40 us |-- own --|
    conclude                                |  own, settle's |
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Self

from ...sched.observe import Clock, Observer, StepKind
from ..record.timeline import Call, Names, Range, Window
from .fit import TimedSample

_THROUGH_TORCH = ("launch", "copy")  # the calls that torch makes


class OwnTimes(NamedTuple):
    """Samples by phase, and by phase and kind of step. ``outside`` is the time of the whole run in ranges outside all
    phases, in ns."""

    phases: dict[str, list[TimedSample]]
    outside: float
    kinds: dict[tuple[str, StepKind], list[TimedSample]]


class PhaseCollector(Observer):
    """Collects a run's ranges and calls, and the times at which steps were planned."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.calls: list[Call] = []
        self._clock: Clock | None = None
        # By step, in order of time.
        self._plans: defaultdict[int, list[tuple[int, StepKind]]] = defaultdict(list)

    def watch(self, clock: Clock, total: int) -> AbstractContextManager[Self]:  # noqa: ARG002
        """Make this the run's observer."""
        self._clock = clock
        self._plans.clear()
        return nullcontext(self)

    def planned(self, step: int, kind: StepKind) -> None:
        assert self._clock is not None
        self._plans[step].append((self._clock.now(), kind))

    def kind_of(self, span: Range) -> StepKind | None:
        """The kind of the range's step, if it was known when the range opened."""
        known = [kind for at, kind in self._plans.get(span.step, ()) if at <= span.start]
        return known[-1] if known else None

    def begin(self) -> None:
        self.ranges.clear()
        self.calls.clear()

    def feed(self, window: Window) -> None:
        self.ranges += window.ranges
        self.calls += window.calls

    def finish(self, names: Names) -> None: ...


def own_times(
    ranges: Sequence[Range],
    calls: Sequence[Call],
    *,
    phases: Collection[str],
    through_torch: float,
    kind_of: Callable[[Range], StepKind | None] = lambda _: None,
) -> OwnTimes:
    """``through_torch`` is the time of torch's own part of a device call, in ns, which no record contains. ``kind_of``
    returns the kind of a range's step, for samples by kind."""
    order = sorted(range(len(ranges)), key=lambda i: (ranges[i].start, -ranges[i].end, -i))
    spent = _calls_within(ranges, calls, through_torch)
    owners, own, outside = dict(_owners(ranges, order, phases)), defaultdict[int, float](float), 0.0
    exclusive = {index: span.end - span.start - spent[index] for index, span in enumerate(ranges)}
    for index, (parent, _) in owners.items():
        if parent is not None:
            exclusive[parent] -= ranges[index].end - ranges[index].start
    for index, (_, owner) in owners.items():
        if owner is None:
            outside += exclusive[index]
        else:
            own[owner] += exclusive[index]
    found = defaultdict[str, list[TimedSample]](list)
    by_kind = defaultdict[tuple[str, StepKind], list[TimedSample]](list)
    for index, ns in own.items():
        span = ranges[index]
        sample, kind = TimedSample(span.size, max(ns, 0.0)), kind_of(span)
        found[span.name].append(sample)
        if kind is not None:
            by_kind[span.name, kind].append(sample)
    return OwnTimes(dict(found), outside, dict(by_kind))


def _owners(
    ranges: Sequence[Range], order: Sequence[int], phases: Collection[str]
) -> Iterator[tuple[int, tuple[int | None, int | None]]]:
    """Each range with the enclosing range, and the range of the phase that it belongs to; None if there is none."""
    enclosing: list[tuple[int, int | None]] = []
    for index in order:
        span = ranges[index]
        while enclosing and not _within(span, ranges[enclosing[-1][0]]):
            enclosing.pop()
        parent, phase = enclosing[-1] if enclosing else (None, None)
        owner = index if span.name in phases else phase
        enclosing.append((index, owner))
        yield index, (parent, owner)


def _within(inner: Range, outer: Range) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end and inner.start < outer.end


def _calls_within(
    ranges: Sequence[Range], calls: Sequence[Call], through_torch: float
) -> defaultdict[int, float]:
    """ns of the device calls directly in each range. A call has the name of its range, which is then found by time."""
    named = defaultdict[str, list[tuple[int, int]]](list)
    for index, span in enumerate(ranges):
        named[span.name].append((span.start, index))
    for starts in named.values():
        starts.sort()
    spent = defaultdict[int, float](float)
    for call in calls:
        starts = named[call.range]
        place = bisect_right(starts, (call.start, len(ranges))) - 1
        if place >= 0:
            taken = call.end - call.start + (through_torch if call.kind in _THROUGH_TORCH else 0)
            spent[starts[place][1]] += taken
    return spent
