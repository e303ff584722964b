"""A rank's part of the requests.

Every rank runs the whole source. All ranks report all endings to it in the same order, so that the requests that follow
from endings are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request, RequestSource
from .sync import EndedRequest, RankShare, SyncRound


class PartitionedSource:
    """A ``RequestSource`` that hands out every ``ranks``-th request of ``source``."""

    def __init__(self, source: RequestSource, share: RankShare) -> None:
        self._source = source
        self._share = share
        self._alive: dict[str, Request] = {}  # on any rank
        self._early: dict[
            str, int
        ] = {}  # ended on another rank before this rank's clock reached their arrival
        self._ended: list[EndedRequest] = []
        self._agreed: int | None = None

    def due(self, now: int) -> Sequence[Request]:
        due = self._source.due(now)
        for req in due:
            self._alive[req.id] = req
            if req.id in self._early:
                self._end(req.id, self._early.pop(req.id))
        return [req for req in due if self._share.owns(req.index)]

    def next_at(self) -> int | None:
        """The arrival that the last round agreed on."""
        return self._agreed

    def ended(self, request: Request, now: int) -> None:
        """Keep the ending for the next round, which reports it to the source of every rank."""
        self._ended.append(EndedRequest(request.id, request.index, now))

    def local_next_at(self) -> int | None:
        """The next arrival on any rank as far as this rank's source can tell, ns."""
        return self._source.next_at()

    def take_ended(self) -> tuple[EndedRequest, ...]:
        """Requests of this rank that ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def apply(self, sync_round: SyncRound) -> None:
        """Take over what all ranks have exchanged."""
        self._agreed = sync_round.next_at
        for end in sync_round.ended:
            if end.id in self._alive:
                self._end(end.id, end.at)
            else:
                self._early[end.id] = end.at

    def _end(self, name: str, at: int) -> None:
        self._source.ended(self._alive.pop(name), at)
