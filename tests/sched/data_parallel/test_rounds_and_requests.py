"""What data-parallel ranks report to one another, and how every rank sees the same requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from schedbench.sched.config import SamplingParams
from schedbench.sched.data_parallel.sync import (
    EndedRequest,
    PartitionedSource,
    RankShare,
    RankStatus,
    SyncRound,
)
from schedbench.sched.request import Request

RANKS = 3


class Clients:
    """Requests with given arrivals; the end of a request creates another one, up to ``most`` in all."""

    def __init__(self, arrivals: Sequence[int], most: int) -> None:
        self._coming = [request(index, at) for index, at in enumerate(arrivals)]
        self._made, self._most = len(arrivals), most
        self.ends: list[tuple[str, int]] = []

    def due(self, now: int) -> Sequence[Request]:
        due = [req for req in self._coming if req.arrival <= now]
        self._coming = [req for req in self._coming if req.arrival > now]
        return due

    def next_at(self) -> int | None:
        return min((req.arrival for req in self._coming), default=None)

    def ended(self, request_: Request, now: int) -> None:
        self.ends.append((request_.id, now))
        if self._made < self._most:
            self._coming.append(request(self._made, now))
            self._made += 1


def request(index: int, at: int) -> Request:
    return Request(f"r{index}", array("q", [1]), SamplingParams(), arrival=at, index=index)


def ranks(arrivals: Sequence[int], most: int = 0) -> tuple[list[Clients], list[PartitionedSource]]:
    sources = [Clients(arrivals, most) for _ in range(RANKS)]
    return sources, [PartitionedSource(source, RankShare(rank, RANKS)) for rank, source in enumerate(sources)]


def exchange(dealt: Sequence[PartitionedSource]) -> SyncRound:
    joined = SyncRound([RankStatus(next_at=each.local_next_at(), ended=each.take_ended()) for each in dealt])
    for each in dealt:
        each.apply(joined)
    return joined


def test_every_request_goes_to_one_rank() -> None:
    _, dealt = ranks([0] * 7)
    assert [[req.index for req in each.due(0)] for each in dealt] == [[0, 3, 6], [1, 4], [2, 5]]


def test_every_rank_sees_ends_in_the_same_order() -> None:
    """Ends reach the clients in order of time, whichever rank they happened on."""
    sources, dealt = ranks([0, 0, 0], most=6)
    first = [each.due(0)[0] for each in dealt]
    for each, req, at in zip(dealt, first, (30, 10, 20), strict=True):
        each.ended(req, at)
        assert each.next_at() is None
    assert exchange(dealt).goes_on
    assert [source.ends for source in sources] == [[("r1", 10), ("r2", 20), ("r0", 30)]] * RANKS
    assert [[(req.index, req.arrival) for req in each.due(40)] for each in dealt] == [
        [(3, 10)],
        [(4, 20)],
        [(5, 30)],
    ]


def test_a_rank_behind_in_time_delivers_an_end_only_when_it_is_due() -> None:
    sources, dealt = ranks([5], most=2)
    [early] = dealt[0].due(5)
    assert not dealt[1].due(4)
    dealt[0].ended(early, 6)
    assert exchange(dealt).next_at == 5
    assert sources[1].ends == []
    dealt[1].due(7)
    assert sources[1].ends == sources[0].ends == [("r0", 6)]


def test_all_ranks_rest_until_the_first_request_of_any() -> None:
    _, dealt = ranks([0, 50, 90])
    for each in dealt:
        each.due(0)
    joined = exchange(dealt)
    assert not joined.goes_on
    assert [each.next_at() for each in dealt] == [50] * RANKS


def test_graph_size_is_that_of_the_largest_rank_and_needs_all_ranks() -> None:
    decodes = [RankStatus(4, graph_rows=4), RankStatus(), RankStatus(7, graph_rows=7)]
    assert SyncRound(decodes).graph_rows == 7
    assert SyncRound([*decodes, RankStatus(90, graph_rows=None)]).graph_rows == 0
    assert SyncRound(decodes).num_tokens == (4, 0, 7)


def test_a_busy_rank_or_a_new_end_keeps_all_ranks_going() -> None:
    assert SyncRound([RankStatus(), RankStatus(busy=True)]).goes_on
    assert SyncRound([RankStatus(), RankStatus(ended=(EndedRequest("r0", 0, 1),))]).goes_on
    assert not SyncRound([RankStatus(), RankStatus(next_at=3)]).goes_on
