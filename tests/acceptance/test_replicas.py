"""Engines that share only a router: each request gets the tokens of one engine."""

from __future__ import annotations

from functools import partial

import pytest

from schedbench.profiles.record.result import Abstained
from tests.acceptance.runs import SMALL, digest, digest_of, known_digest, result_of, statuses, value

NONE = "device.values=none"
FEWER = (*SMALL, "workload.requests=10", "workload.output_tokens={dist: uniform, min: 1, max: 24}")


def replicas(count: int) -> str:
    return f"engine.replicas={count}"


reference = partial(known_digest, "mixed", *FEWER)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("overlap", ["true", "false"])
def test_the_tokens_are_those_of_one_engine(count: int, overlap: str) -> None:
    result = result_of("mixed", *FEWER, NONE, replicas(count), f"engine.overlap={overlap}")
    assert statuses(result) == {"finished"}
    assert digest_of(result) == reference(NONE)


def test_real_values_a_warm_up_and_pages_change_nothing() -> None:
    ways = (replicas(2), "measure.warmup_requests=3", "engine.page_size=16", "engine.relay=latest")
    assert digest("mixed", *FEWER, *ways) == reference()


def test_a_closed_loop_of_one_client_uses_all_replicas_in_turn() -> None:
    result = result_of(
        "mixed", *FEWER, NONE, replicas(2), "workload.arrival={process: closed, concurrency: 1}"
    )
    assert digest_of(result) == reference(NONE)
    assert [rank.role for rank in result.ranks] == ["replica", "replica"]
    assert all(rank.per_step["prefill"].steps >= 5 for rank in result.ranks)


def test_a_replica_without_requests_makes_no_step() -> None:
    result = result_of("mixed", *FEWER, NONE, replicas(3), "workload.requests=2")
    assert [bool(rank.per_step) for rank in result.ranks] == [True, True, False]


def test_two_replicas_shorten_the_queue_without_a_transfer() -> None:
    one = result_of("mixed", *FEWER, NONE)
    two = result_of("mixed", *FEWER, NONE, replicas(2))
    assert value(two, "ttft_ms") < value(one, "ttft_ms")
    assert "transfer_ms" not in two.metrics
    assert isinstance(two.metrics["forward_occupancy"], Abstained)


@pytest.mark.parametrize(
    "scenario", ["spec_v2", *(pytest.param(name, marks=pytest.mark.wide) for name in ("spec_v1", "hisparse"))]
)
def test_other_modes_have_the_tokens_of_one_engine(scenario: str) -> None:
    few = ("workload.requests=6", "workload.output_tokens=8")
    assert digest(scenario, *few, replicas(2)) == digest(scenario, *few)
