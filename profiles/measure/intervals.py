"""Arithmetic on half-open intervals [start, end) of integer nanoseconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T")
_start = itemgetter(0)


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union, ns."""
    total = 0
    reached: int | None = None
    for start, end in sorted(intervals):
        if reached is None or start >= reached:
            total += end - start
            reached = end
        elif end > reached:
            total += end - reached
            reached = end
    return total


def counted(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """How many of the spans are open, at each instant at which that changes."""
    open_now, found = 0, dict[int, int]()
    for at, by in sorted((at, by) for start, end in spans for at, by in ((start, 1), (end, -1))):
        open_now += by
        found[at] = open_now
    return list(found.items())


def partition(
    start: int, end: int, claims: Mapping[T, Sequence[tuple[int, int]]], rest: T
) -> Iterator[tuple[int, int, T]]:
    """[start, end) in stretches, each with the first of ``claims`` that covers it, or else with ``rest``."""
    if start >= end:
        return
    cuts = sorted({start, end, *(at for spans in claims.values() for span in spans for at in span)})
    begin, current = start, None
    for low, high in pairwise(cuts):
        found = next(
            (tag for tag, spans in claims.items() if any(a <= low and high <= b for a, b in spans)), rest
        )
        if current is not None and found != current:
            yield begin, low, current
            begin = low
        current = found
    assert current is not None
    yield begin, end, current


class IntervalTrack(Generic[T]):
    """Tagged intervals that arrive roughly in order, queried by spans that only move forward in time."""

    def __init__(self) -> None:
        self._items: list[tuple[int, int, T]] = []  # by start
        self._head = 0

    def add(self, items: Iterable[tuple[int, int, T]]) -> None:
        """Only those that start after the first of ``items`` are put in order again."""
        del self._items[: self._head]
        self._head = 0
        arrived = sorted(items, key=_start)
        if arrived:
            at = bisect_right(self._items, arrived[0][0], key=_start)
            late = self._items[at:]
            self._items[at:] = sorted(late + arrived, key=_start) if late else arrived

    def forget(self, until: int) -> None:
        """Drops intervals that ended by ``until``, which no later query can reach."""
        items = self._items
        count = len(items)
        at = self._head
        while at < count and items[at][1] <= until:
            at += 1
        self._head = at

    def overlaps(self, start: int, end: int) -> list[tuple[int, int, T]]:
        """Parts of the intervals inside [start, end). ``start`` never decreases between calls."""
        if start >= end:
            return []
        self.forget(start)
        items = self._items
        last = bisect_left(items, end, self._head, key=_start)
        return [  # without calls of ``max`` and ``min``, which take longer than all else here
            (lo if lo > start else start, hi if hi < end else end, tag)
            for lo, hi, tag in items[self._head : last]
            if hi > start
        ]


class IntervalUnion:
    """Length of a union of intervals that arrive roughly in order, inside a moving span.

    Everything before the last ``settle`` is final; an interval that reaches back over it counts
    only from there on.
    """

    def __init__(self) -> None:
        self.length = 0
        self._pending: list[tuple[int, int]] = []
        self._from: int | None = None

    def add(self, intervals: Iterable[tuple[int, int]]) -> None:
        self._pending.extend(intervals)

    def settle(self, origin: int, until: int) -> None:
        """Adds the length of the union in [origin, until). Later calls count from ``until`` on."""
        reached = origin if self._from is None else self._from
        self._from = until
        self._pending.sort()
        length = 0
        keep = []
        for item in self._pending:
            start, end = item
            if end > until:
                keep.append(item)
                end = until
            if end > reached:
                if start < end:
                    length += end - (start if start > reached else reached)
                reached = end
        self.length += length
        self._pending = keep
