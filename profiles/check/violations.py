"""Promises that were not kept, told so that a reader knows where to look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Violation(NamedTuple):
    """``promise`` in a few words; ``field`` is the batch's, or the buffer, that broke it; ``says`` is a sentence."""

    promise: str
    field: str
    says: str
    step: int | None = None
    request: str | None = None


class Violations:
    """The first of each promise and field, with how many more there were: one mistake is made at every step."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], Violation] = {}
        self._count: dict[tuple[str, str], int] = {}

    def add(self, found: Iterable[Violation]) -> None:
        for violation in found:
            key = violation.promise, violation.field
            self._first.setdefault(key, violation)
            self._count[key] = self._count.get(key, 0) + 1

    def told(self) -> Sequence[Violation]:
        return [_counted(violation, self._count[key] - 1) for key, violation in self._first.items()]


def _counted(violation: Violation, more: int) -> Violation:
    return violation._replace(says=f"{violation.says} (and {more} more like it)") if more else violation
