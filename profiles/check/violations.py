"""Violated invariants, with the place to look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Violation(NamedTuple):
    """``promise`` is the invariant in a few words, ``field`` the field of the batch or the buffer, ``says`` a
    sentence."""

    promise: str
    field: str
    says: str
    step: int | None = None
    request: str | None = None


class Violations:
    """The first violation of each promise and field, with the number of later ones: a defect may violate at each
    step."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], Violation] = {}
        self._count: dict[tuple[str, str], int] = {}

    def add(self, found: Iterable[Violation]) -> None:
        for violation in found:
            key = violation.promise, violation.field
            self._first.setdefault(key, violation)
            self._count[key] = self._count.get(key, 0) + 1

    def found(self) -> Sequence[Violation]:
        more = {key: f" (and {count - 1} more like it)" * (count > 1) for key, count in self._count.items()}
        return [found._replace(says=found.says + more[key]) for key, found in self._first.items()]
