"""The draft model's input from a prompt that is prefilled in chunks."""

from __future__ import annotations

import pytest

from tests.acceptance.runs import digest_of, result_of, value

FEW = ("workload.requests=5", "workload.prompt_tokens={dist: uniform, min: 90, max: 200}")
CHUNKS, WHOLE = "engine.chunked_prefill_size=64", "engine.chunked_prefill_size=none"


@pytest.mark.parametrize("scenario", ["spec_v2", pytest.param("spec_v1", marks=pytest.mark.wide)])
def test_latest_extends_the_draft_of_a_chunked_prompt_like_a_whole_one(scenario: str) -> None:
    chunks, whole = (result_of(scenario, *FEW, "engine.relay=latest", size) for size in (CHUNKS, WHOLE))
    upstream = result_of(scenario, *FEW, "engine.relay=pr25945", CHUNKS)
    assert digest_of(chunks) == digest_of(whole) == digest_of(upstream)
    assert value(chunks, "accept_length") == value(whole, "accept_length")
    assert value(upstream, "accept_length") < value(whole, "accept_length")
