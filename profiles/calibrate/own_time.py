"""A phase's own time: its range, without the phases inside it and without its device calls.

This is the rule by which a profile's phases are charged: a range of no phase belongs to the one around it::

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

_THROUGH_TORCH = ("launch", "copy")  # calls that torch makes, on a way of its own


class OwnTimes(NamedTuple):
    """Samples by phase, and by phase and kind of step; ``outside``: ns in ranges that no phase covers, over the whole
    run."""

    phases: dict[str, list[TimedSample]]
    outside: float
    kinds: dict[tuple[str, StepKind], list[TimedSample]]


class Collector(Observer):
    """Keeps a run's ranges and calls, and what was planned when."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.calls: list[Call] = []
        self._clock: Clock | None = None
        self._plans: defaultdict[int, list[tuple[int, StepKind]]] = defaultdict(
            list
        )  # by step, in order of time

    def watch(self, clock: Clock, total: int) -> AbstractContextManager[Self]:  # noqa: ARG002
        """The run's listener."""
        self._clock = clock
        self._plans.clear()
        return nullcontext(self)

    def planned(self, step: int, kind: StepKind) -> None:
        assert self._clock is not None
        self._plans[step].append((self._clock.now(), kind))

    def kind_of(self, one: Range) -> StepKind | None:
        """Of its step, as far as that was known when the range opened."""
        known = [kind for at, kind in self._plans.get(one.step, ()) if at <= one.start]
        return known[-1] if known else None

    def begin(self) -> None:
        self.ranges.clear()
        self.calls.clear()

    def feed(self, window: Window) -> None:
        self.ranges += window.ranges
        self.calls += window.calls

    def finish(self, names: Names) -> None: ...


def _unknown(one: Range) -> StepKind | None:  # noqa: ARG001
    return None


def own_times(
    ranges: Sequence[Range],
    calls: Sequence[Call],
    *,
    phases: Collection[str],
    through_torch: float,
    kind_of: Callable[[Range], StepKind | None] = _unknown,
) -> OwnTimes:
    """``through_torch``: ns that torch takes from its caller to the device's door; it is in no record.
    ``kind_of`` a range's step, where kinds are to be told apart."""
    order = sorted(range(len(ranges)), key=lambda i: (ranges[i].start, -ranges[i].end, -i))
    spent = _calls_within(ranges, calls, through_torch)
    owners, own, outside = dict(_owners(ranges, order, phases)), defaultdict[int, float](float), 0.0
    for index, (parent, owner) in owners.items():
        one = ranges[index]
        length = one.end - one.start
        if owner is None:
            outside += length - spent[index]
        else:
            own[owner] += length - spent[index]
        if parent is not None:  # its length is counted here, not there
            above = owners[parent][1]
            if above is None:
                outside -= length
            else:
                own[above] -= length
    found, by_kind = (
        defaultdict[str, list[TimedSample]](list),
        defaultdict[tuple[str, StepKind], list[TimedSample]](list),
    )
    for index, ns in own.items():
        one = ranges[index]
        sample, kind = TimedSample(one.size, max(ns, 0.0)), kind_of(one)
        found[one.name].append(sample)
        if kind is not None:
            by_kind[one.name, kind].append(sample)
    return OwnTimes(dict(found), outside, dict(by_kind))


def _owners(
    ranges: Sequence[Range], order: Sequence[int], phases: Collection[str]
) -> Iterator[tuple[int, tuple[int | None, int | None]]]:
    """Of each range: the one around it, and the phase that it belongs to; None where there is none."""
    around: list[tuple[int, int | None]] = []
    for index in order:
        one = ranges[index]
        while around and not _within(one, ranges[around[-1][0]]):
            around.pop()
        parent, phase = around[-1] if around else (None, None)
        owner = index if one.name in phases else phase
        around.append((index, owner))
        yield index, (parent, owner)


def _within(inner: Range, outer: Range) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end and inner.start < outer.end


def _calls_within(
    ranges: Sequence[Range], calls: Sequence[Call], through_torch: float
) -> defaultdict[int, float]:
    """ns of device calls directly in each range. Calls know the innermost range's name, not which of that name."""
    named = defaultdict[str, list[tuple[int, int]]](list)
    for index, one in enumerate(ranges):
        named[one.name].append((one.start, index))
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
