"""Request sources that give every stage of a pipeline the same requests in the same turn.

The first stage sends the arrivals of each turn to the second stage, which forwards them to the third, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..link import Link, LinkError
from ..request import Request, RequestSource
from .stage import Stage

REQUESTS = "requests"


class FirstStageSource:
    """The first stage's source: sends every arrival along the pipeline."""

    over = False  # only the other stages wait for the end of the run

    def __init__(self, source: RequestSource, link: Link, stage: Stage) -> None:
        self._source = source
        self._link = link
        self._stage = stage
        self._turn = 0

    def due(self, now: int) -> Sequence[Request]:
        arrived = self._source.due(now)
        self._send(list(arrived))
        return arrived

    def next_at(self) -> int | None:
        return self._source.next_at()

    def ended(self, request: Request, now: int) -> None:
        self._source.ended(request, now)

    def close(self) -> None:
        """Announce that no turn follows, so that the other stages stop."""
        self._send(None)

    def _send(self, arrived: list[Request] | None) -> None:
        self._link.send(self._stage.following, REQUESTS, (self._turn, arrived))
        self._turn += 1


class ForwardedSource:
    """The source of every later stage: receives the requests of each turn from the preceding stage."""

    def __init__(self, link: Link, stage: Stage) -> None:
        self.over = False  # no turn follows
        self._link = link
        self._stage = stage
        self._turn = 0

    def due(self, now: int) -> Sequence[Request]:  # noqa: ARG002
        """The requests of this turn. Raises LinkError, also if a turn is missing: the stages would plan different
        batches."""
        turn, arrived = self._link.receive(self._stage.preceding, REQUESTS).value
        if turn != self._turn:
            raise LinkError(
                f"stage {self._stage.index} waited for the requests of turn {self._turn} from stage "
                f"{self._stage.preceding}, which sent those of turn {turn}"
            )
        self._turn += 1
        if not self._stage.is_last:
            self._link.send(self._stage.following, REQUESTS, (turn, arrived))
        self.over = arrived is None
        return arrived or ()

    def next_at(self) -> int | None:
        """None: the preceding stage decides when the next turn begins."""
        return None

    def ended(self, request: Request, now: int) -> None:
        """Does nothing: the first stage reports endings."""

    def close(self) -> None:
        """Does nothing: the first stage ends the run."""
