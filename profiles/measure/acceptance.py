"""How many drafts were accepted, told by the scheduler's announcements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...sched.observe import Observer

if TYPE_CHECKING:
    from ...sched.request import Request


class AcceptanceLog(Observer):
    """Counts verifies of requests by the tokens that they gave, whatever an ending cut of them."""

    def __init__(self) -> None:
        self._verifies: Counter[int] = Counter()

    @classmethod
    def merged(cls, logs: Iterable[AcceptanceLog]) -> AcceptanceLog:
        """Of workers that had a part of the requests each."""
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
        """Of each of the first ``drafts`` draft positions, the share of verifies that accepted it."""
        total = self._verifies.total()
        reached = (
            sum(count for length, count in self._verifies.items() if length > position)
            for position in range(1, drafts + 1)
        )
        return [count / total for count in reached] if total else []
