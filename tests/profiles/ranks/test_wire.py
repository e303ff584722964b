"""Messages of other processes: every declared type is decoded unchanged, and no bytes can run code."""

from __future__ import annotations

import json
import os
import pickle
from array import array
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from schedbench.profiles.measure.distribution import Distribution
from schedbench.profiles.measure.requests import RequestRecord, RequestTotals
from schedbench.profiles.measure.waiting import StageTime
from schedbench.profiles.ranks import process_link, wire
from schedbench.profiles.ranks.codec import MalformedMessageError, encode, parse, reader
from schedbench.profiles.ranks.processes import MESSAGE_TYPES, RESULT
from schedbench.profiles.ranks.wire import MessageFormat, MessageHead
from schedbench.profiles.run.task import RankReport
from schedbench.sched.config import SamplingParams
from schedbench.sched.data_parallel.sync import ROUND, EndedRequest, RankStatus
from schedbench.sched.disagg.layout import HANDSHAKE, KV, REQUEST, Chunk, Dropped, Failed, Metadata
from schedbench.sched.link import LinkError
from schedbench.sched.loop.pipelined import PROXY
from schedbench.sched.pipeline import REQUESTS
from schedbench.sched.request import Request
from tests.acceptance.runs import result_of
from tests.profiles.ranks.slow_peer_process import host_link

FORM = MessageFormat(MESSAGE_TYPES, None)
DRAFT = (torch.tensor([0.5, -2.0]).bfloat16(), torch.tensor(7), torch.empty(0, 3))


def request() -> Request:
    sampling = SamplingParams(stop_token_ids=(1, 2), grammar=("regex", ("a+",)))
    return Request("r1", array("q", [5, -6]), sampling, arrival=7, index=1)


def decoded(tag: str, value: object) -> Any:
    return FORM.decoded(FORM.encoded(MessageHead(tag, value)).numpy().tobytes()).value


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        (HANDSHAKE, Dropped("r0", preallocated=True)),
        (KV, Failed("r0", "no \ud800 reason")),
        (KV, Chunk("r0", 0, 4, (1, 2), Metadata(3, (float("-inf"),), 1, None, 9))),
        (ROUND, RankStatus(1, None, True, 5, (EndedRequest("r1", 2, 3),))),
        (REQUESTS, (4, None)),
        (REQUEST, None),
    ],
)
def test_a_value_is_decoded_unchanged(tag: str, value: object) -> None:
    found = decoded(tag, value)
    assert found == value and type(found) is type(value)


def test_requests_and_tensors_are_decoded_unchanged() -> None:
    [found] = decoded(REQUESTS, (0, [request()]))[1]
    assert all(getattr(found, name) == getattr(request(), name) for name in Request.__slots__)
    draft = decoded(KV, Chunk("r0", 0, 1, (), Metadata(0, (), 0, None, None, DRAFT))).metadata.draft
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(draft, DRAFT, strict=True))


def test_a_report_is_decoded_unchanged() -> None:
    result = result_of("mixed", "workload.requests=2")
    totals = RequestTotals(gaps=Distribution([3, 3, 9]), tokens=Counter({5: 2}), retractions=2)
    totals.accepted[3] += 1
    totals.records.append(RequestRecord("r0", 0, 1, 2, None, 4, 5, 6, array("q", [8]), "finished", ""))
    sent = RankReport(result, totals, StageTime(1, 2, 3, {0: 4}), {"r0": 1}, 9)
    found = decoded(RESULT, sent)
    assert (found.result, found.stage_time, found.damage, found.end) == (
        result,
        sent.stage_time,
        {"r0": 1},
        9,
    )
    assert found.account.records == totals.records and found.account.retractions == 2
    assert (found.account.tokens, found.account.accepted) == (Counter({5: 2}), Counter({3: 1}))
    assert found.account.gaps._seen == Counter({3: 2, 9: 1})


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


class FakeGroup:
    """Replaces torch.distributed: the peer has sent ``stream`` and nothing after it."""

    def __init__(self, stream: bytes) -> None:
        self._left = deque([stream])

    def recv(self, part: torch.Tensor, peer: int) -> None:  # noqa: ARG002
        size = part.numel()
        if len(self._left[0]) < size:
            raise RuntimeError("Connection closed by peer")
        part.copy_(torch.frombuffer(bytearray(self._left[0][:size]), dtype=torch.uint8))
        self._left[0] = self._left[0][size:]

    def isend(self, part: torch.Tensor, to: int) -> Any:  # noqa: ARG002
        raise RuntimeError("Connection closed by peer")

    def get_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return 2


def framed(head: bytes, inline: int = 0, *, size: int | None = None) -> bytes:
    sizes = torch.tensor([len(head) if size is None else size, inline]).numpy().tobytes()
    return (sizes + head).ljust(2048, b"\0")


def head(tag: object, value: object, *shapes: object) -> bytes:
    return json.dumps([tag, value, shapes, None, None]).encode()


def of_proxy(size: int, dtype: str = "int64") -> bytes:
    return head(PROXY, 1, {"TensorShape": [[size], dtype, False]})


def error_of(monkeypatch: pytest.MonkeyPatch, stream: bytes) -> str:
    """Returns the error of a rank that waits for a message, as its link reports it."""
    group = FakeGroup(stream)
    for module in (wire, process_link):
        monkeypatch.setattr(module, "dist", group)
    link = host_link(("prefill", "decode"), MESSAGE_TYPES, patience=20)
    with pytest.raises(LinkError) as refused:
        link.receive(1, HANDSHAKE)
    return str(refused.value)


def test_a_pickle_is_refused_without_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    evil = pickle.dumps(("handshake", Evil(mark), (), None, None))
    assert error_of(monkeypatch, framed(evil)) == (
        "prefill waited for 'handshake', and decode is gone: it sent what is no message: not JSON"
    )
    hidden = head(HANDSHAKE, {"Preallocated": ["r0", {"Evil": [str(mark)]}]})
    assert "Preallocated.pages: expected a list, got 'Evil'" in error_of(monkeypatch, framed(hidden))
    assert not mark.exists()
    pickle.loads(evil)
    assert mark.exists()  # the pickle would have run


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (framed(b"", size=-1), "a head of -1 bytes"),
        (framed(b"", size=1 << 40), "a head of 1099511627776 bytes"),
        (framed(b"[" * 1900), "not JSON"),
        (framed(b"{}"), "a head is a list that begins with a tag"),
        (framed(head("exec", None)), "no type is declared for the tag 'exec'"),
        (framed(head("bye", 3)), "'bye': expected a text, got 'int'"),
        (framed(head(HANDSHAKE, {"Request": []})), "'handshake': expected Preallocated, got 'Request'"),
        (framed(head(HANDSHAKE, {"Dropped": ["r0", 1]})), "Dropped.preallocated: expected true or false"),
        (framed(head(HANDSHAKE, {"Dropped": ["r0"]})), "expected Dropped, got 'Dropped'"),
        (framed(of_proxy(2), 9), "9 bytes of tensors that have 16"),
        (framed(of_proxy(-1)), "a tensor with a negative size"),
        (framed(of_proxy(1, "load")), "expected a type of numbers"),
    ],
)
def test_a_malformed_message_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, stream: bytes, why: str
) -> None:
    said = error_of(monkeypatch, stream)
    assert said.startswith("prefill waited for 'handshake', and decode is gone: it sent what is no message: ")
    assert why in said


def test_a_value_without_a_declared_form_is_not_sent() -> None:
    with pytest.raises(TypeError, match="a message cannot hold object"):
        encode(object())
    with pytest.raises(MalformedMessageError, match="expected nothing"):
        reader(Any)(parse(b"1"))
