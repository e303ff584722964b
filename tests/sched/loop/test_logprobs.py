"""Log-probabilities of requests that ask for them: one per output token, the same in every loop and setup."""

from __future__ import annotations

from functools import cache

import pytest

from schedbench.sched.config import SamplingParams
from tests.sched.loop.cpu_engine import EngineRun, config, request, requests

SETUPS: list[dict[str, object]] = [
    {"overlap": False},
    {"page_size": 16},
    {"chunked_prefill_size": 48},
    {"kv_tokens": 400, "schedule_conservativeness": 0.05},
]


def run(**changes: object) -> dict[str, list[float]]:
    asked = requests(8, sampling=SamplingParams(logprobs=True, ignore_eos=True, temperature=0.7))
    return {req.id: req.output_logprobs for req in EngineRun(config(**changes)).run(asked)}


@cache
def expected() -> dict[str, list[float]]:
    return run()


def test_every_token_has_a_log_probability() -> None:
    asked = requests(6, sampling=SamplingParams(logprobs=True))
    for req in EngineRun(config()).run(asked):
        assert len(req.output_logprobs) == len(req.output_ids)
        assert all(logprob <= 0 for logprob in req.output_logprobs)


@pytest.mark.parametrize("changes", SETUPS, ids=str)
def test_every_setup_gives_the_same_output_logprobs(changes: dict[str, object]) -> None:
    assert run(**changes) == expected()


def test_requests_that_ask_for_none_get_none() -> None:
    assert all(not req.output_logprobs for req in EngineRun(config()).run(requests(4)))


def prompts(**changes: object) -> dict[str, list[float]]:
    asked = requests(8, sampling=SamplingParams(prompt_logprobs=True, ignore_eos=True))
    done = EngineRun(config(**changes)).run(asked)
    for req in done:
        assert len(req.prompt_logprobs) == len(req.origin_input_ids) - 1
        assert all(logprob <= 0 for logprob in req.prompt_logprobs)
    return {req.id: req.prompt_logprobs for req in done}


@cache
def expected_prompts() -> dict[str, list[float]]:
    return prompts(overlap=False, radix_cache=False, chunked_prefill_size=None)


@pytest.mark.parametrize("changes", [{}, *SETUPS, {"mixed_chunk": True, "chunked_prefill_size": 24}], ids=str)
def test_every_setup_gives_the_same_prompt_logprobs(changes: dict[str, object]) -> None:
    assert prompts(**changes) == expected_prompts()


def test_a_scored_prompt_is_not_taken_from_the_cache() -> None:
    ids = range(300, 340)
    params = SamplingParams(prompt_logprobs=True, max_new_tokens=2)
    first, again = request("first", ids, 2), request("again", ids, 2, arrival=400_000)
    first.sampling = again.sampling = params
    EngineRun(config()).run([first, again])
    assert again.cached_tokens == 0
    assert again.prompt_logprobs == first.prompt_logprobs
