"""Acceptance of drafts, collected by an observer of the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...sched.observe import Observer

if TYPE_CHECKING:
    from ...sched.request import Request


class AcceptanceLog(Observer):
    """Counts the verifies of requests by the tokens that each accepted, before any cut at the end of a request."""

    def __init__(self) -> None:
        self._verifies: Counter[int] = Counter()

    @classmethod
    def merged(cls, logs: Iterable[AcceptanceLog]) -> AcceptanceLog:
        """The log of several workers, each of which had a part of the requests."""
        whole = cls()
        for log in logs:
            whole._verifies += log._verifies
        return whole

    def verified(self, request: Request, accepted: int) -> None:  # noqa: ARG002
        self._verifies[accepted] += 1

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify; None where nothing was verified."""
        total = self._verifies.total()
        return sum(length * count for length, count in self._verifies.items()) / total if total else None

    def by_position(self, drafts: int) -> list[float]:
        """The share of verifies that accepted each of the first ``drafts`` draft positions."""
        total = self._verifies.total()
        reached = (
            sum(count for length, count in self._verifies.items() if length > position)
            for position in range(1, drafts + 1)
        )
        return [count / total for count in reached] if total else []
