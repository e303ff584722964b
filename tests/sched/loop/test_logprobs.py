"""Log-probabilities of requests that ask for them: one per output token, the same in every loop and setup."""

from __future__ import annotations

import pytest

from schedbench.sched.config import SamplingParams
from tests.sched.loop.cpu_engine import Room, config, requests

SETUPS = [
    {},
    {"overlap": False},
    {"page_size": 16},
    {"chunked_prefill_size": 48},
    {"kv_tokens": 400, "schedule_conservativeness": 0.05},
]


def run(**changes: object) -> dict[str, list[float]]:
    asked = requests(8, sampling=SamplingParams(logprobs=True, ignore_eos=True, temperature=0.7))
    return {req.id: req.output_logprobs for req in Room(config(**changes)).run(asked)}


def test_there_is_one_per_token_and_it_is_a_log_probability() -> None:
    asked = requests(6, sampling=SamplingParams(logprobs=True))
    for req in Room(config()).run(asked):
        assert len(req.output_logprobs) == len(req.output_ids)
        assert all(logprob <= 0 for logprob in req.output_logprobs)


@pytest.mark.parametrize("changes", SETUPS, ids=str)
def test_every_setup_gives_the_same(changes: dict[str, object]) -> None:
    assert run(**changes) == run()


def test_who_does_not_ask_gets_none() -> None:
    assert all(not req.output_logprobs for req in Room(config()).run(requests(4)))
