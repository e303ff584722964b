"""Data-parallel ranks give one rank's tokens, in every state, mode and world."""

from __future__ import annotations

from functools import partial

import pytest

from schedbench.sched.relay.states import states
from tests.acceptance.runs import (
    digest,
    digest_of,
    executed,
    known_digest,
    resolved,
    result_of,
    statuses,
    value,
)

SMALL = (
    "model.preset=tiny-deep",
    "workload.requests=6",
    "workload.arrival={process: closed, concurrency: 3}",
    "workload.prompt_tokens={dist: uniform, min: 4, max: 70}",
    "workload.output_tokens={dist: uniform, min: 2, max: 6}",
    "engine.overlap=auto",
    "engine.chunked_prefill_size=32",
    "measure.warmup_requests=0",
)
TWO, FOUR = "engine.data_parallel.ranks=2", "engine.data_parallel.ranks=4"
NONE = ("device.values=none",)
SAMPLING = "workload.sampling"
SERIAL = ("engine.overlap=false",)
EAGER = ("engine.cuda_graph=false",)
SHARED = (*EAGER, "engine.data_parallel.mlp=shared")
SOME = ("pr25774-before", "pr25944", "pr25945", "latest")  # each way to publish lengths and to hand on tokens
LAUNCHES = {"graphs": (), "eager": EAGER, "shared": SHARED}


alone = partial(known_digest, "mixed", *SMALL)


IN_WIDE = (
    (TWO, "engine.mixed_chunk=false"),
    (TWO, "engine.chunked_prefill_size=none", "engine.mixed_chunk=false"),
    (TWO, "engine.max_running_requests=1", *SERIAL),
    (TWO, "workload.arrival={process: poisson, rate: 800}", *EAGER),
    (FOUR, *SERIAL),
    ("engine.data_parallel.ranks=3", "engine.page_size=16", *SHARED),
    (FOUR, *SHARED, *SERIAL),
)


@pytest.mark.parametrize(
    ("values", "knobs"),
    [
        ((), (TWO, *SERIAL)),
        ((), ("engine.data_parallel.ranks=3", *SHARED)),
        *(pytest.param(NONE, knobs, marks=pytest.mark.wide) for knobs in IN_WIDE),
    ],
)
def test_no_knob_changes_a_token(values: tuple[str, ...], knobs: tuple[str, ...]) -> None:
    assert digest("mixed", *SMALL, *knobs, *values) == alone(*values)


@pytest.mark.parametrize("state", SOME)
def test_a_state_has_the_tokens_of_one_rank(state: str) -> None:
    """``make wide`` checks all states."""
    assert digest("mixed", *SMALL, TWO, f"engine.relay={state}", *SHARED, *NONE) == alone(*NONE)


@pytest.mark.wide
@pytest.mark.parametrize("state", states())
@pytest.mark.parametrize("ranks", [(TWO,), (FOUR, "engine.mixed_chunk=false")], ids=["two", "four unmixed"])
@pytest.mark.parametrize("loop", ["overlapped", "serial"])
@pytest.mark.parametrize("launches", LAUNCHES)
def test_every_state_has_the_tokens_of_one_rank_in_every_mode(
    state: str, ranks: tuple[str, ...], loop: str, launches: str
) -> None:
    """Values are real where two ranks share an MLP, the only arithmetic that depends on the ranks."""
    values = () if launches == "shared" and ranks == (TWO,) else NONE
    serial = SERIAL if loop == "serial" else ()
    knobs = (*ranks, f"engine.relay={state}", *serial, *LAUNCHES[launches])
    assert digest("mixed", *SMALL, *knobs, *values) == alone(*values)


@pytest.mark.parametrize(
    "mode",
    [
        (
            "mixed",
            *SMALL,
            f"{SAMPLING}={{temperature: 0.8, top_p: 0.9, presence_penalty: 0.4, logprobs: true}}",
        ),
        ("mixed", *SMALL, f"{SAMPLING}={{temperature: 0.7, grammar: {{regex: '[0-9]{{1,9}}'}}}}"),
        ("faults/hosting",),
    ],
    ids=["sampling", "grammar", "KV on the host"],
)
def test_a_mode_gives_the_tokens_of_one_rank(mode: tuple[str, ...]) -> None:
    few = (*mode, "engine.relay=latest", "workload.requests=5")
    assert digest(*few, TWO) == digest(*few)


@pytest.mark.wide
def test_retraction_changes_no_token() -> None:
    """A rank that is short of KV retracts its requests without delaying the other ranks."""
    growing = (
        "workload.requests=8",
        "workload.arrival=burst",
        "workload.shared_prefix={groups: 8, tokens: 1}",
        "workload.prompt_tokens.max=40",
        "workload.output_tokens={dist: uniform, min: 20, max: 50}",
    )
    tight = ("engine.kv_tokens=96", "engine.schedule_conservativeness=0.01", "engine.radix_cache=false")
    result = result_of("mixed", *SMALL, *tight, *growing, TWO)
    assert value(result, "retractions") > 0 and statuses(result) == {"finished"}
    assert digest_of(result) == alone(*growing)


def test_ranks_without_requests_take_part_in_every_step() -> None:
    two = ("workload.requests=2", "measure.warmup_requests=0")
    result = result_of("mixed", *SMALL, FOUR, *two, *SHARED)
    assert digest_of(result) == alone(*two)
    assert [set(rank.per_step) for rank in result.ranks[2:]] == [{"idle"}, {"idle"}]


@pytest.mark.wide
@pytest.mark.parametrize("launches", ["graphs", "shared"])
def test_processes_give_the_same_tokens_and_counts(launches: str) -> None:
    """The same ranks run as processes over gloo."""
    knobs = (*SMALL, TWO, *LAUNCHES[launches])
    apart = executed(resolved("mixed", *knobs), world="distributed")
    together = result_of("mixed", *knobs)
    assert digest_of(apart) == digest_of(together) == alone()
    assert [rank.per_step for rank in apart.ranks] == [rank.per_step for rank in together.ranks]
