"""How every stage comes to hear of the same requests at the same turn: the first one tells the next, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..link import Link
from ..request import Request
from .stages import Stage

REQUESTS = "requests"


class Source(Protocol):
    def due(self, now: int) -> Sequence[Request]: ...

    def next_at(self) -> int | None: ...

    def ended(self, request: Request, now: int) -> None: ...


class Leading:
    """The first stage's: what it hands out goes along the pipeline too."""

    over = False  # that is for the others to hear

    def __init__(self, source: Source, link: Link, stage: Stage) -> None:
        self._source = source
        self._link = link
        self._stage = stage

    def due(self, now: int) -> Sequence[Request]:
        arrived = self._source.due(now)
        self._link.send(self._stage.following, REQUESTS, list(arrived))
        return arrived

    def next_at(self) -> int | None:
        return self._source.next_at()

    def ended(self, request: Request, now: int) -> None:
        self._source.ended(request, now)

    def close(self) -> None:
        """No more turns: let the others stop."""
        self._link.send(self._stage.following, REQUESTS, None)


class Following:
    """Every other stage's: waits for what the one before hands on."""

    def __init__(self, link: Link, stage: Stage) -> None:
        self.over = False  # there will be no more turns
        self._link = link
        self._stage = stage

    def due(self, now: int) -> Sequence[Request]:  # noqa: ARG002
        arrived: list[Request] | None = self._link.receive(self._stage.preceding, REQUESTS).value
        if not self._stage.is_last:
            self._link.send(self._stage.following, REQUESTS, arrived)
        self.over = arrived is None
        return arrived or ()

    def next_at(self) -> int | None:
        """Never: the next turn says."""
        return None

    def ended(self, request: Request, now: int) -> None:
        """The first stage's business."""

    def close(self) -> None:
        """The first stage's business."""
