"""Speculation on data-parallel ranks: a rank without work drafts nothing and changes no other rank's drafts."""

from __future__ import annotations

import pytest

from schedbench.profiles.record.result import Abstained, Result
from tests.acceptance.runs import digest_of, each_state, executed, known_result, resolved, statuses, value

FEW = (
    "workload.requests=4",
    "workload.arrival={process: constant, rate: 150}",
    "workload.output_tokens={dist: uniform, min: 4, max: 40}",
    "measure.warmup_requests=0",
)
ALONE = ("engine.radix_cache=false",)  # a draft after another request's prefix is less accurate
TWO = "engine.data_parallel.ranks=2"
SOON = ("pr25774-before", "pr25944", "latest")


def two_ranks(mode: str, state: str, overlap: str) -> Result:
    loop = (f"engine.relay={state}", f"engine.overlap={overlap}")
    return known_result(f"spec_{mode}", *FEW, *ALONE, TWO, *loop)


def reference(mode: str) -> tuple[str, float]:
    result = known_result(f"spec_{mode}", *FEW, *ALONE)
    return digest_of(result), value(result, "accept_length")


@pytest.mark.parametrize(
    ("mode", "overlap"),
    [
        ("v2", "true"),
        pytest.param("v1", "false", marks=pytest.mark.wide),
        pytest.param("v2", "false", marks=pytest.mark.wide),
    ],
)
@pytest.mark.parametrize("state", each_state(*SOON))
def test_tokens_and_acceptance_equal_those_of_one_rank(state: str, mode: str, overlap: str) -> None:
    result = two_ranks(mode, state, overlap)
    assert statuses(result) == {"finished"}
    assert (digest_of(result), value(result, "accept_length")) == reference(mode)
    assert any("idle" in rank.per_step for rank in result.ranks)


@pytest.mark.parametrize("state", SOON)
def test_an_idle_step_drafts_nothing(state: str) -> None:
    """There is no kernel and no copy: publishing and stashing no rows launches nothing, and no buffer is made for
    them."""
    result = two_ranks("v2", state, "true")
    idle = [rank.per_step["idle"] for rank in result.ranks if "idle" in rank.per_step]
    assert idle
    for counts in idle:
        assert {stream: set(tallies) for stream, tallies in counts.streams.items()} == {"forward": {"sync"}}


def test_acceptance_is_reported_where_times_abstain() -> None:
    """As in a run of one engine, because acceptance counts tokens."""
    found = executed(resolved("spec_v2", *FEW, *ALONE, TWO), adversary=0)
    assert isinstance(found.metrics["ttft_ms"], Abstained)
    assert value(found, "accept_length") == reference("v2")[1]
