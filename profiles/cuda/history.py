"""What held when: a value that changes at instants, looked up later."""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

T = TypeVar("T")


class History(Generic[T]):
    """Piecewise constant. Changes come in order of time; of several at one instant the last holds."""

    def __init__(self, first: T) -> None:
        self.current = first
        self._first = first
        self._instants: list[int] = []
        self._values: list[T] = []

    def change(self, at: int, value: T) -> None:
        self.current = value
        self._instants.append(at)
        self._values.append(value)

    def at(self, instant: int) -> T:
        index = bisect_right(self._instants, instant)
        return self._values[index - 1] if index else self._first
