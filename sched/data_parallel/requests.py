"""A rank's part of the requests. Every rank has the whole source: they all hear of all ends in the same order, so that
what clients send next is the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..request import Request
from .rounds import End, Round
from .share import RankShare


class RequestSource(Protocol):
    def due(self, now: int) -> Sequence[Request]: ...

    def next_at(self) -> int | None: ...

    def ended(self, request: Request, now: int) -> None: ...


class Dealt:
    """A rank's source, of which it has every ``ranks``-th request."""

    def __init__(self, source: RequestSource, share: RankShare) -> None:
        self._source = source
        self._share = share
        self._alive: dict[str, Request] = {}  # on any rank
        self._early: dict[str, int] = {}  # ended elsewhere, before it was due by this rank's clock
        self._ended: list[End] = []
        self._agreed: int | None = None

    def due(self, now: int) -> Sequence[Request]:
        due = self._source.due(now)
        for req in due:
            self._alive[req.id] = req
            if req.id in self._early:
                self._end(req.id, self._early.pop(req.id))
        return [req for req in due if self._share.has(req.index)]

    def next_at(self) -> int | None:
        """As agreed upon in the last round."""
        return self._agreed

    def ended(self, request: Request, now: int) -> None:
        """For the next round: clients hear of it then, on every rank."""
        self._ended.append(End(request.id, request.index, now))

    def upcoming(self) -> int | None:
        """When anybody's next request comes, as far as this rank knows, ns."""
        return self._source.next_at()

    def news(self) -> tuple[End, ...]:
        """Ends of this rank's since it was last asked."""
        news, self._ended = tuple(self._ended), []
        return news

    def hear(self, told: Round) -> None:
        self._agreed = told.next_at
        for end in told.ended:
            if end.id in self._alive:
                self._end(end.id, end.at)
            else:
                self._early[end.id] = end.at

    def _end(self, name: str, at: int) -> None:
        self._source.ended(self._alive.pop(name), at)
