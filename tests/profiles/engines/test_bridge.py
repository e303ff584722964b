"""What the bridge reports of an engine's scheduler: requests, tokens, ends and steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from schedbench.profiles.engines.bridge import LOST, AllEnded, RunBridge
from schedbench.profiles.engines.failures import EngineFaultError
from schedbench.profiles.run.rank_context import ALONE
from schedbench.sched.config import SamplingParams
from schedbench.sched.observe import LogicalClock, Observer, StepInfo, StepKind
from schedbench.sched.request import Request, Status


class Source:
    """Requests that arrive at given instants."""

    def __init__(self, *arrivals: int) -> None:
        self._left = [
            Request(f"r{n}", array("q", [1, 2]), SamplingParams(), at) for n, at in enumerate(arrivals)
        ]
        self.ends: list[tuple[str, int]] = []

    def due(self, now: int) -> Sequence[Request]:
        due = [request for request in self._left if request.arrival <= now]
        self._left = self._left[len(due) :]
        return due

    def next_at(self) -> int | None:
        return self._left[0].arrival if self._left else None

    def ended(self, request: Request, now: int) -> None:
        self.ends.append((request.id, now))


class Log(Observer):
    def __init__(self) -> None:
        self.tokens_of: list[tuple[str, int]] = []
        self.steady: dict[int, bool] = {}
        self.launches: list[tuple[int, str, int]] = []
        self.ends: list[tuple[str, Status, str]] = []

    def tokens(self, requests: Sequence[Request], count: int) -> None:
        self.tokens_of += [(request.id, count) for request in requests]

    def ended(self, request: Request) -> None:
        self.ends.append((request.id, request.status, request.reason))

    def launched(self, info: StepInfo) -> None:
        self.launches.append((info.step, info.kind, info.num_tokens))

    def settled(self, info: StepInfo) -> None:
        self.steady[info.step] = info.steady


def bridge_of(source: Source, *, speculates: bool = False) -> tuple[RunBridge, Log, LogicalClock]:
    log, clock = Log(), LogicalClock()
    parts: Any = SimpleNamespace(observer=log, clock=clock, source=source, context=ALONE)
    return RunBridge(parts, speculates=speculates), log, clock


def test_an_idle_scheduler_sleeps_until_the_next_arrival_and_ends_after_the_last() -> None:
    source = Source(0, 50)
    bridge, _, clock = bridge_of(source)
    assert [request.id for request in bridge.due(True)] == ["r0"]
    assert bridge.due(False) == []
    assert clock.now() == 0
    bridge.end("r0", Status.FINISHED, "length")
    assert [request.id for request in bridge.due(True)] == ["r1"]
    assert clock.now() == 50
    bridge.end("r1", Status.FINISHED, "length")
    with pytest.raises(AllEnded):
        bridge.due(True)


def test_an_unfinished_request_of_an_idle_scheduler_is_reported_lost() -> None:
    source = Source(0)
    bridge, log, _ = bridge_of(source)
    bridge.due(True)
    with pytest.raises(AllEnded):
        bridge.due(True)
    assert log.ends == [("r0", Status.FAILED, LOST)]
    assert bridge.lost
    assert source.ends == [("r0", 0)]


def test_tokens_and_ends_are_reported_once() -> None:
    source = Source(0)
    bridge, log, clock = bridge_of(source)
    (request,) = bridge.due(True)
    bridge.begin_step("prefill", {"r0": 2}, 2)
    clock.sleep_until(10)
    bridge.advance("r0", [7])
    bridge.advance("r0", [7])
    clock.sleep_until(20)
    bridge.advance("r0", [7, 8, 9])
    bridge.end("r0", Status.FINISHED, "length")
    bridge.advance("r0", [7, 8, 9, 10])  # a step that was launched before the end was known
    bridge.end("r0", Status.ABORTED, "again")
    assert log.tokens_of == [("r0", 1), ("r0", 2)]
    assert log.ends == [("r0", Status.FINISHED, "length")]
    assert list(request.output_ids) == [7, 8, 9]
    assert (request.first_scheduled_at, request.first_token_at, request.finished_at) == (0, 10, 20)
    assert request.cached_tokens == 2
    assert source.ends == [("r0", 20)]
    assert not bridge.requests


def test_a_token_that_changes_after_it_was_reported_fails_the_run() -> None:
    bridge, _, _ = bridge_of(Source(0))
    bridge.due(True)
    bridge.advance("r0", [7, 8])
    bridge.advance("r0", [7])  # a list that lags behind
    with pytest.raises(EngineFaultError, match="request r0: output token 1 was reported as 8 and became 5"):
        bridge.advance("r0", [7, 5, 9])


TOLD: Any = ([7, 8], True)  # the message that has the last tokens


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([([7], False), ([], False), ([8], True)], ""),
        ([TOLD], ""),
        ([([7], False), TOLD], "token 7 as output token 1 instead of token 8"),
        ([([7, 8], False), TOLD], "token 7 as output token 2 instead of the end"),
        ([([8], False), ([7], True)], "token 8 as output token 0 instead of token 7"),
        ([([7], True)], "the end as output token 1 instead of token 8"),
        ([([7], True), ([8], True)], "the end as output token 1 instead of token 8"),
        ([([7, 8], False)], "nothing as output token 2 instead of the end"),
        ([], "nothing as output token 0 instead of token 7"),
    ],
    ids=["parts", "whole", "twice", "all twice", "order", "lost", "early end", "no end", "no message"],
)
def test_a_request_has_failed_if_its_client_was_not_sent_all_tokens_in_order_and_the_end(
    messages: Sequence[tuple[Sequence[int], bool]], says: str
) -> None:
    bridge, log, _ = bridge_of(Source(0))
    bridge.streams = True
    bridge.due(True)
    for tokens, ended in messages:  # before the engine's tokens are read, or after
        bridge.streamed("r0", tokens, ended)
        bridge.advance("r0", [7, 8])
    bridge.advance("r0", [7, 8])
    bridge.end("r0", Status.FINISHED, "length")
    bridge.streamed("r0", [9], True)  # of a request that has ended
    failed = ("r0", Status.FAILED, f"its client was sent {says}")
    assert log.ends == [failed if says else ("r0", Status.FINISHED, "length")]


@pytest.mark.parametrize(
    ("streams", "end"),
    [(True, (Status.ABORTED, "gone")), (False, (Status.FINISHED, "length"))],
    ids=["aborted", "messages are not reported"],
)
def test_other_streams_are_not_judged(streams: bool, end: tuple[Status, str]) -> None:
    bridge, log, _ = bridge_of(Source(0))
    bridge.streams = streams
    bridge.due(True)
    bridge.advance("r0", [7, 8])
    bridge.end("r0", *end)
    assert log.ends == [("r0", *end)]


def test_log_probabilities_of_messages_are_kept_if_they_were_asked_for() -> None:
    bridge, _, _ = bridge_of(Source(0, 0, 0))
    asked = [SamplingParams(), SamplingParams(logprobs=True), SamplingParams(prompt_logprobs=True)]
    requests = bridge.due(True)
    for request, sampling in zip(requests, asked, strict=True):
        request.sampling = sampling
        bridge.streamed(request.id, [7], False, [-1.5], [-2.5])
        bridge.streamed(request.id, [8], True, [-0.5])
    assert [(request.output_logprobs, request.prompt_logprobs) for request in requests] == [
        ([], []),
        ([-1.5, -0.5], []),
        ([], [-2.5]),
    ]


@pytest.mark.parametrize(
    ("rows", "penalised", "ended", "steady"),
    [
        (["r0", "r1"], False, False, True),
        (["r1", "r0"], False, False, True),
        (["r0"], False, False, False),
        (["r0", "r1"], True, False, False),
        (["r0", "r1"], False, True, False),
    ],
    ids=["as before", "in another order", "other rows", "penalised", "one ended"],
)
def test_a_step_is_steady_if_nothing_joined_ended_or_was_penalised(
    rows: list[str], penalised: bool, ended: bool, steady: bool
) -> None:
    bridge, log, _ = bridge_of(Source())
    bridge.launched(bridge.begin_step("decode", {"r0": 0, "r1": 0}, 2))
    step = bridge.begin_step("decode", dict.fromkeys(rows, 0), len(rows), penalised)
    bridge.launched(step)
    bridge.settled(step, ended)
    assert log.steady == {step: steady}
    assert bridge.next_step == 2


def test_a_speculative_step_includes_its_draft_and_draft_extend() -> None:
    bridge, log, _ = bridge_of(Source(), speculates=True)
    steps: Sequence[tuple[StepKind, int]] = (("prefill", 7), ("verify", 8))
    for kind, tokens in steps:
        step = bridge.begin_step(kind, {"r0": 0, "r1": 0}, tokens)
        bridge.launched(step)
        bridge.settled(step, False)
    assert log.launches == [
        *[(1, "prefill", 7), (2, "draft_extend", 7)],
        *[(3, "draft", 2), (4, "verify", 8), (5, "draft_extend", 8)],
    ]
    assert log.steady == {1: False, 2: False, 3: True, 4: True, 5: True}
