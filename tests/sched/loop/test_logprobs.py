"""Log-probabilities of requests that ask for them: one per output token, the same in every loop and setup."""

from __future__ import annotations

from functools import cache

import pytest

from schedbench.sched.config import SamplingParams
from tests.sched.loop.cpu_engine import EngineRun, config, request, requests

SAMPLING = {
    "output": SamplingParams(logprobs=True, ignore_eos=True, temperature=0.7),
    "prompt": SamplingParams(prompt_logprobs=True, ignore_eos=True),
}
SETUPS: list[dict[str, object]] = [
    {},
    {"overlap": False},
    {"page_size": 16},
    {"chunked_prefill_size": 48},
    {"kv_tokens": 400, "schedule_conservativeness": 0.05},
    {"mixed_chunk": True, "chunked_prefill_size": 24},
]


def scores(of: str, **changes: object) -> dict[str, list[float]]:
    """One log-probability per token of the output, or per token of the prompt but the first."""
    found = {}
    for req in EngineRun(config(**changes)).run(requests(8, sampling=SAMPLING[of])):
        found[req.id] = req.output_logprobs if of == "output" else req.prompt_logprobs
        tokens = req.output_ids if of == "output" else req.origin_input_ids[1:]
        assert len(found[req.id]) == len(tokens)
        assert all(logprob <= 0 for logprob in found[req.id])
    return found


@cache
def expected(of: str) -> dict[str, list[float]]:
    return scores(of, overlap=False, radix_cache=False, chunked_prefill_size=None)


@pytest.mark.parametrize("changes", SETUPS, ids=str)
@pytest.mark.parametrize("of", SAMPLING)
def test_every_setup_gives_the_same_logprobs(of: str, changes: dict[str, object]) -> None:
    assert scores(of, **changes) == expected(of)


def test_requests_that_ask_for_none_get_none() -> None:
    assert all(not req.output_logprobs for req in EngineRun(config()).run(requests(4)))


def test_a_scored_prompt_is_not_taken_from_the_cache() -> None:
    ids = range(300, 340)
    params = SamplingParams(prompt_logprobs=True, max_new_tokens=2)
    first, again = request("first", ids, 2), request("again", ids, 2, arrival=400_000)
    first.sampling = again.sampling = params
    EngineRun(config()).run([first, again])
    assert again.cached_tokens == 0
    assert again.prompt_logprobs == first.prompt_logprobs
