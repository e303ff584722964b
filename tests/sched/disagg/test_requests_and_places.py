"""The layout of ranks, and the messages between router and workers over a link that is a list."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from schedbench.profiles.run.rank_context import RankContext
from schedbench.sched.config import SamplingParams
from schedbench.sched.disagg.kv import FakeLink
from schedbench.sched.disagg.layout import (
    ENDED,
    HANDSHAKE,
    KV,
    REQUEST,
    Chunk,
    Dropped,
    Preallocated,
    RankLayout,
)
from schedbench.sched.disagg.router import RoutedSource, run_router
from schedbench.sched.link import LinkError, Message
from schedbench.sched.observe import LogicalClock
from schedbench.sched.request import Request


class ListLink:
    """A link whose incoming messages are a list (``incoming``) and whose sent messages are recorded (``sent``). A chunk
    of KV comes with a tensor."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, Any]] = []
        self.incoming: list[tuple[str, Any]] = []
        self.lost: dict[int, str] = {}

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:  # noqa: ARG002
        self.sent.append((to, tag, value))

    def flush(self, tag: str) -> None: ...

    def receive(self, source: int, tag: str) -> Message:
        raise NotImplementedError(source, tag)

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError(tag, tensors)

    def poll(self, tag: str) -> Message | None:
        for entry in self.incoming:
            if entry[0] == tag:
                self.incoming.remove(entry)
                return Message(0, entry[1], (torch.tensor([0]),) if isinstance(entry[1], Chunk) else ())
        return None

    def wait(self, tags: Sequence[str], until: int | None) -> None:  # noqa: ARG002
        """The request that was sent last ends, unless the next one is due."""
        if until is None:
            self.incoming.append((ENDED, self.sent[-1][2].id))

    def gone(self) -> Mapping[int, str]:
        return self.lost


class SilentLink(ListLink):
    def wait(self, tags: Sequence[str], until: int | None) -> None:  # noqa: ARG002
        raise LinkError("nothing comes")


class Client:
    """Sends a request when the one before it has ended."""

    def __init__(self, count: int) -> None:
        self._left = [request(index) for index in range(count)]
        self._due = [self._left.pop(0)]
        self.ends: list[str] = []

    def due(self, now: int) -> Sequence[Request]:  # noqa: ARG002
        due, self._due = self._due, []
        return due

    def next_at(self) -> int | None:
        return 0 if self._due else None

    def ended(self, request: Request, now: int) -> None:  # noqa: ARG002
        self.ends.append(request.id)
        if self._left:
            self._due = [self._left.pop(0)]


def request(index: int) -> Request:
    return Request(f"r{index}", array("q", [1, 2, 3]), SamplingParams(max_new_tokens=9), 0, index)


def test_requests_use_all_pairs_of_workers() -> None:
    place = RankLayout(0, prefill=2, decode=3)
    pairs = [(place.prefill_of(index), place.decode_of(index)) for index in range(6)]
    assert len(set(pairs)) == 6
    assert {decode for _, decode in pairs} == {2, 3, 4}


def test_ranks_have_names() -> None:
    names = [RankLayout(rank, prefill=2, decode=1).name for rank in range(4)]
    assert names == ["prefill 0", "prefill 1", "decode 0", "router"]


def test_the_router_sends_each_request_to_both_workers_and_then_the_end() -> None:
    link, client = ListLink(), Client(2)
    run_router(client, link, LogicalClock(), RankLayout(2, prefill=1, decode=1))
    assert client.ends == ["r0", "r1"]
    sent = [(to, value and value.id) for to, _, value in link.sent]
    assert sent == [(0, "r0"), (1, "r0"), (0, "r1"), (1, "r1"), (0, None), (1, None)]


@pytest.mark.parametrize(("rank", "name"), [(0, "prefill 0"), (1, "decode 0")])
def test_requests_of_lost_workers_fail_and_are_not_sent(rank: int, name: str) -> None:
    link, client = ListLink(), Client(3)
    link.lost = {rank: "it broke"}
    failed = run_router(client, link, LogicalClock(), RankLayout(2, prefill=1, decode=1))
    assert client.ends == [req.id for req in failed] == ["r0", "r1", "r2"]
    assert {req.reason for req in failed} == {f"{name} is gone: it broke"}
    assert [value for _, _, value in link.sent] == [None, None]


def test_the_router_fails_a_request_whose_end_never_comes() -> None:
    client = Client(1)
    [failed] = run_router(client, SilentLink(), LogicalClock(), RankLayout(2, prefill=1, decode=1))
    assert (failed.status.value, client.ends) == ("failed", ["r0"])
    assert failed.reason == "decode 0 did not report its end: nothing comes, 6 times"


@pytest.mark.parametrize(("rank", "most"), [(0, 1), (1, 9)])
def test_a_prefill_worker_generates_one_token(rank: int, most: int) -> None:
    link = ListLink()
    link.incoming = [(REQUEST, request(0)), (REQUEST, None)]
    source = RoutedSource(link, RankLayout(rank, prefill=1, decode=1))
    [found] = source.due(0)
    assert found.sampling.max_new_tokens == most
    source.ended(found, 0)
    assert link.sent == ([(2, ENDED, "r0")] if rank else [])
    assert (source.closes(), source.closes()) == (True, False)


@pytest.mark.parametrize(
    ("rank", "own", "most"), [(0, ["r0", "r2"], 1), (1, ["r1"], 1), (2, ["r0", "r1", "r2"], 9)]
)
def test_an_independent_worker_takes_its_requests_and_ends_those_of_others(
    rank: int, own: list[str], most: int
) -> None:
    client = Client(3)
    context = RankContext(place=RankLayout(rank, prefill=2, decode=1))
    source = context.source(client)
    taken = []
    while source.next_at() is not None:
        for req in source.due(0):
            assert req.sampling.max_new_tokens == most
            taken.append(req.id)
            source.ended(req, 0)
    assert taken == own
    assert client.ends == ["r0", "r1", "r2"]
    assert (context.rank, context.reports_requests) == (rank, rank == 2)


def test_the_fake_link_answers_handshakes_itself() -> None:
    link = ListLink()
    link.incoming = [(REQUEST, request(0))]
    prefill = FakeLink(link, RankLayout(0, prefill=1, decode=1))
    assert prefill.poll(HANDSHAKE) is None
    assert prefill.poll(REQUEST) is not None
    said = prefill.poll(HANDSHAKE)
    assert said is not None and said.value == Preallocated("r0", ())
    decode = FakeLink(link, RankLayout(1, prefill=1, decode=1))
    decode.send(0, HANDSHAKE, Preallocated("r0", (1, 2)))
    decode.send(0, HANDSHAKE, Dropped("r1", preallocated=False))
    came = decode.poll(KV)
    assert came is not None and came.value.metadata.token == 0
    assert decode.poll(KV) is None and not link.sent
