"""How every stage comes to hear of the same requests at the same turn: the first one tells the next, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..link import Link, LinkError
from ..request import Request
from .stages import Stage

REQUESTS = "requests"


class RequestSource(Protocol):
    def due(self, now: int) -> Sequence[Request]: ...

    def next_at(self) -> int | None: ...

    def ended(self, request: Request, now: int) -> None: ...


class Leading:
    """The first stage's: what it hands out goes along the pipeline too."""

    over = False  # that is for the others to hear

    def __init__(self, source: RequestSource, link: Link, stage: Stage) -> None:
        self._source = source
        self._link = link
        self._stage = stage
        self._turn = 0

    def due(self, now: int) -> Sequence[Request]:
        arrived = self._source.due(now)
        self._tell(list(arrived))
        return arrived

    def next_at(self) -> int | None:
        return self._source.next_at()

    def ended(self, request: Request, now: int) -> None:
        self._source.ended(request, now)

    def close(self) -> None:
        """No more turns: let the others stop."""
        self._tell(None)

    def _tell(self, arrived: list[Request] | None) -> None:
        self._link.send(self._stage.following, REQUESTS, (self._turn, arrived))
        self._turn += 1


class Following:
    """Every other stage's: waits for what the one before hands on, turn by turn."""

    def __init__(self, link: Link, stage: Stage) -> None:
        self.over = False  # there will be no more turns
        self._link = link
        self._stage = stage
        self._turn = 0

    def due(self, now: int) -> Sequence[Request]:  # noqa: ARG002
        """Raises LinkError, too when a turn is missing: the stages would plan different batches."""
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
        """Never: the next turn says."""
        return None

    def ended(self, request: Request, now: int) -> None:
        """The first stage's business."""

    def close(self) -> None:
        """The first stage's business."""
