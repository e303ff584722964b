"""The requests of a data-parallel rank, and what the ranks exchange before each step (upstream
``prepare_mlp_sync_batch``), host to host.

A round holds the status of every rank and is the same on all ranks, so all ranks decide alike from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..link import Link
from ..request import Request, RequestSource

ROUND = "round"


@dataclass(frozen=True, slots=True)
class RankShare:
    """Rank ``rank`` of ``ranks``. Requests are assigned in turn (upstream's round robin)."""

    rank: int
    ranks: int

    def owns(self, index: int) -> bool:
        """Whether request number ``index`` of the workload belongs to this rank."""
        return index % self.ranks == self.rank

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]


class EndedRequest(NamedTuple):
    """``place`` is the request's position in the workload, ``at`` the instant at which it ended, ns."""

    id: str
    place: int
    at: int


class RankStatus(NamedTuple):
    """The state of one rank. A ``busy`` rank starts the next round at once, even if no rank has tokens; ``next_at`` is
    the arrival of its next request as far as it is known, ns."""

    num_tokens: int = 0  # of the step that the rank has planned
    graph_rows: int | None = 0  # rows of a graph that the step needs; None if it cannot run as a graph
    busy: bool = False
    next_at: int | None = None
    ended: tuple[EndedRequest, ...] = ()  # since the last round


@dataclass(frozen=True, slots=True)
class SyncRound:
    statuses: Sequence[RankStatus]  # by rank

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Of each rank's step; all zeros if no rank has one."""
        return tuple(status.num_tokens for status in self.statuses)

    @property
    def graph_rows(self) -> int:
        """Rows of the graph that all ranks replay together; 0 if the step of one of them cannot run as a graph."""
        rows = [status.graph_rows for status in self.statuses]
        return 0 if None in rows else max(count for count in rows if count is not None)

    @property
    def goes_on(self) -> bool:
        """Whether the next round follows at once, although no rank has a step."""
        return any(status.busy or status.ended for status in self.statuses)

    @property
    def next_at(self) -> int | None:
        """When the next request arrives on any rank, ns."""
        return min((status.next_at for status in self.statuses if status.next_at is not None), default=None)

    @property
    def ended(self) -> Sequence[EndedRequest]:
        """Requests that ended since the last round, in an order that is the same on every rank."""
        ends = [end for status in self.statuses for end in status.ended]
        return sorted(ends, key=lambda end: (end.at, end.place))


def exchange(link: Link, share: RankShare, status: RankStatus) -> SyncRound:
    """Send ``status`` to all other ranks and receive theirs. Raises LinkError."""
    for rank in share.others:
        link.send(rank, ROUND, status)
    return SyncRound(
        [status if rank == share.rank else link.receive(rank, ROUND).value for rank in range(share.ranks)]
    )


class PartitionedSource:
    """A ``RequestSource`` that hands out every ``ranks``-th request of ``source``.

    Every rank runs the whole source. All ranks report all endings to it in the same order, so that the requests that
    follow from endings are the same on every rank.
    """

    def __init__(self, source: RequestSource, share: RankShare) -> None:
        self._source = source
        self._share = share
        self._alive: dict[str, Request] = {}  # on any rank
        # Ended on another rank before this rank's clock reached their arrival.
        self._early: dict[str, int] = {}
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
