"""Arithmetic on half-open intervals [start, end) of integer nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable
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


class Track(Generic[T]):
    """Tagged intervals, queried by spans that only move forward in time.

    What ended before a queried span is forgotten with the next ``add``.
    """

    def __init__(self) -> None:
        self._items: list[tuple[int, int, T]] = []
        self._head = 0

    def __len__(self) -> int:
        return len(self._items) - self._head

    def add(self, items: Iterable[tuple[int, int, T]]) -> None:
        del self._items[: self._head]
        self._head = 0
        self._items.extend(items)
        self._items.sort(key=_start)

    def overlaps(self, start: int, end: int) -> list[tuple[int, int, T]]:
        """Parts of the intervals inside [start, end). ``start`` never decreases between calls."""
        items = self._items
        count = len(items)
        at = self._head
        while at < count and items[at][1] <= start:
            at += 1
        self._head = at
        found = []
        while at < count and items[at][0] < end:
            lo, hi, tag = items[at]
            if hi > start:
                found.append((max(lo, start), min(hi, end), tag))
            at += 1
        return found


class Union:
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
        """Count what lies in [origin, until); later calls count from ``until`` on."""
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
