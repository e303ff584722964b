"""From scenario to requests: drawn lengths, arrivals, closed loops, determinism, shared prefixes, bounds."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from schedbench.scenarios.loader import load
from schedbench.scenarios.script import draw, requested, summarise
from schedbench.scenarios.workload import Workload, build
from schedbench.scenarios.workload_schema import Distribution, Fixed, LogNormal, Normal, Uniform
from schedbench.sched.request import Request
from tests.scenarios.refusals import refused

SECOND = 10**9


def mixed(*overrides: str, seed: int = 0, context_len: int = 4096) -> Workload:
    return build(load("mixed", overrides), vocab_size=512, context_len=context_len, seed=seed)


def requests(*overrides: str, seed: int = 0) -> list[Request]:
    return list(mixed(*overrides, seed=seed).upcoming())


def prompts(taken: Sequence[Request]) -> list[list[int]]:
    return [list(request.origin_input_ids) for request in taken]


def outputs(taken: Sequence[Request]) -> list[int]:
    return [request.sampling.max_new_tokens for request in taken]


def gaps(taken: Sequence[Request]) -> list[int]:
    return [later.arrival - earlier.arrival for earlier, later in pairwise(taken)]


def test_requests_are_numbered_in_order_of_arrival() -> None:
    taken = requests()

    assert [request.id for request in taken] == [f"r{index}" for index in range(64)]
    assert [request.index for request in taken] == list(range(64))
    assert min(gaps(taken)) >= 0
    assert taken[0].arrival == 0


def test_tokens_are_in_the_vocabulary_and_lengths_in_their_bounds() -> None:
    for request in requests():
        assert 16 + 128 <= len(request.origin_input_ids) <= 700 + 128
        assert 4 <= request.sampling.max_new_tokens <= 64
        assert 0 <= min(request.origin_input_ids) <= max(request.origin_input_ids) < 512
        assert request.origin_input_ids.typecode == "q"


def test_equal_seeds_give_equal_requests() -> None:
    first, *others = [requests(seed=7) for _ in range(10)]
    for other in others:
        assert (prompts(other), outputs(other), gaps(other)) == (prompts(first), outputs(first), gaps(first))


def test_another_seed_gives_other_requests() -> None:
    ours, theirs = requests(seed=0), requests(seed=1)

    assert prompts(ours) != prompts(theirs)
    assert outputs(ours) != outputs(theirs)
    assert gaps(ours) != gaps(theirs)


@pytest.mark.parametrize(
    "override",
    [
        "workload.output_tokens={dist: normal, mean: 9, std: 3}",
        "workload.arrival=burst",
        "workload.abort.fraction=0.5",
    ],
)
def test_prompts_do_not_depend_on_other_draws(override: str) -> None:
    assert prompts(requests(override)) == prompts(requests())


def test_more_requests_begin_with_the_same_ones() -> None:
    assert prompts(requests("workload.requests=80"))[:64] == prompts(requests())


def test_a_burst_arrives_at_once() -> None:
    assert {request.arrival for request in requests("workload.arrival=burst")} == {0}


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert set(gaps(requests("workload.arrival={process: constant, rate: 250}"))) == {SECOND // 250}


@pytest.mark.parametrize(
    ("arrival", "variation"),
    [
        ("{process: poisson, rate: 50}", 1.0),
        ("{process: gamma, rate: 50, burstiness: 1}", 1.0),
        ("{process: gamma, rate: 50, burstiness: 0.25}", 2.0),
        ("{process: gamma, rate: 50, burstiness: 4}", 0.5),
    ],
)
def test_random_gaps_have_the_rate_and_the_spread_of_their_process(arrival: str, variation: float) -> None:
    sizes = ("workload.requests=4000", "workload.prompt_tokens=1", "workload.shared_prefix=null")
    between = gaps(requests(*sizes, f"workload.arrival={arrival}"))
    mean = sum(between) / len(between)
    spread = (sum((gap - mean) ** 2 for gap in between) / len(between)) ** 0.5

    assert mean == pytest.approx(SECOND / 50, rel=0.1)
    assert spread / mean == pytest.approx(variation, rel=0.1)


def test_a_closed_loop_answers_every_end_with_the_next_request() -> None:
    workload = mixed("workload.arrival={process: closed, concurrency: 3}", "workload.requests=5")
    alive = list(workload.upcoming())
    later = [workload.on_end(alive[1], 700), workload.on_end(alive[0], 900), workload.on_end(alive[2], 950)]

    assert [(request.id, request.arrival) for request in alive] == [("r0", 0), ("r1", 0), ("r2", 0)]
    assert [request and (request.id, request.arrival) for request in later] == [
        ("r3", 700),
        ("r4", 900),
        None,
    ]


def test_a_closed_loop_of_more_clients_than_requests_sends_them_all() -> None:
    assert len(requests("workload.arrival={process: closed, concurrency: 100}")) == 64


def test_an_open_loop_sends_nothing_when_a_request_ends() -> None:
    workload = mixed()
    assert workload.on_end(next(workload.upcoming()), 5) is None


def test_every_prompt_begins_with_the_prefix_of_a_group() -> None:
    taken = prompts(requests())

    assert len({tuple(prompt[:128]) for prompt in taken}) == 4
    assert len({tuple(prompt[128:144]) for prompt in taken}) == 64


def test_requested_and_achieved_lengths_include_the_prefix() -> None:
    achieved = mixed().achieved
    prompts, outputs = achieved.prompt_tokens.requested, achieved.output_tokens.requested

    assert achieved.requests == 64
    assert prompts is not None and astuple(prompts) == pytest.approx((486, 486, 793.8))
    assert achieved.prompt_tokens.achieved.mean == pytest.approx(486, rel=0.1)
    assert outputs is not None and astuple(outputs) == pytest.approx((34, 34, 61))
    assert achieved.clipped == 0


def test_prompts_longer_than_the_context_are_shortened_and_counted() -> None:
    workload = mixed(context_len=400)
    taken = list(workload.upcoming())
    whole = requests()

    shortened = [
        prompts([cut]) + outputs([cut]) != prompts([full]) + outputs([full])
        for cut, full in zip(taken, whole, strict=True)
    ]
    assert all(request.seqlen + request.sampling.max_new_tokens <= 400 for request in taken)
    assert min(outputs(taken)) == 1
    assert workload.achieved.clipped == sum(shortened) > 0
    assert all(full[: len(cut)] == cut for cut, full in zip(prompts(taken), prompts(whole), strict=True))


def test_sampling_reaches_every_request() -> None:
    sampling = (
        "{temperature: 0.5, top_k: 9, stop_token_ids: [3, 4], ignore_eos: off, grammar: {choice: [a, b]}}"
    )
    [request] = requests(f"workload.sampling={sampling}", "workload.requests=1")
    [other] = requests("workload.sampling.grammar.regex='[a-z]+'", "workload.requests=1")

    assert request.sampling.temperature == 0.5
    assert request.sampling.top_k == 9
    assert request.sampling.stop_token_ids == (3, 4)
    assert not request.sampling.ignore_eos
    assert request.sampling.grammar == ("choice", ("a", "b"))
    assert other.sampling.grammar == ("regex", ("[a-z]+",))


def test_a_share_of_the_requests_is_aborted() -> None:
    aborts = mixed("workload.abort={fraction: 0.25, after_tokens: 5}").aborts

    assert len(aborts) == 16
    assert set(aborts.values()) == {5}
    assert set(aborts) <= {f"r{index}" for index in range(64)}
    assert list(aborts) != [f"r{index}" for index in range(16)]


def test_named_requests_are_aborted() -> None:
    assert mixed("workload.abort={requests: [r7, r9]}").aborts == {"r7": 0, "r9": 0}
    problems = refused(mixed, "workload.abort={requests: [r7, r64]}")
    assert problems == ["--set: workload.abort.requests: expected r0 to r63, got 'r64'"]


def test_a_long_trace_costs_the_memory_of_one_prompt_at_a_time(tmp_path: Path) -> None:
    blocks, block = 100, 512
    with (tmp_path / "long.jsonl").open("w") as file:
        for index in range(100):
            hash_ids = list(range(index * blocks, (index + 1) * blocks))
            record = {
                "timestamp": index,
                "input_length": blocks * block,
                "output_length": 1,
                "hash_ids": hash_ids,
            }
            print(json.dumps(record), file=file)
    overrides = (
        f"workload.trace={tmp_path / 'long.jsonl'}",
        "workload.format=mooncake",
        "workload.requests=null",
    )

    tracemalloc.start()
    total = sum(len(request.origin_input_ids) for request in mixed(*overrides, context_len=10**6).upcoming())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert total == 100 * blocks * block  # 41 MB as int64
    assert peak < 5 * 1024**2


SIZE = 40_000
DISTRIBUTIONS = [
    Fixed(dist="fixed", value=17),
    Uniform(dist="uniform", min=16, max=700),
    Normal(dist="normal", mean=500, std=60),
    LogNormal(dist="lognormal", mean=900, std=700),
]


@pytest.mark.parametrize("dist", DISTRIBUTIONS, ids=lambda dist: dist.dist)
def test_many_draws_have_the_mean_and_percentiles_that_were_requested(dist: Distribution) -> None:
    drawn = draw(dist, SIZE, rng=np.random.default_rng(0))

    assert drawn.dtype == np.int64
    assert astuple(summarise(drawn)) == pytest.approx(astuple(requested(dist)), rel=0.02)


def test_both_ends_of_uniform_are_drawn() -> None:
    drawn = draw(Uniform(dist="uniform", min=3, max=5), 200, rng=np.random.default_rng(0))
    assert set(drawn) == {3, 4, 5}


@pytest.mark.parametrize("kind", [Normal, LogNormal])
def test_draws_are_clipped_to_their_bounds(kind: type[Normal] | type[LogNormal]) -> None:
    dist = kind.model_validate({"dist": kind.__name__.lower(), "mean": 50, "std": 200, "min": 20, "max": 90})
    drawn = draw(dist, 500, rng=np.random.default_rng(0))

    assert (drawn.min(), drawn.max()) == (20, 90)


def test_without_bounds_no_draw_is_below_one_token() -> None:
    assert draw(Normal(dist="normal", mean=1, std=50), 500, rng=np.random.default_rng(0)).min() == 1
