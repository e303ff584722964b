"""Prompts without decodes: the embeddings, and the copies of each state."""

from __future__ import annotations

import pytest
import torch

from schedbench.profiles.record.result import digest as digest_over
from schedbench.sched.loop.embedding import PLACEHOLDER
from schedbench.sched.model.decoder import Embedder
from schedbench.sched.relay.states import states
from tests.acceptance.cells import (
    EXTEND_LENS,
    FORWARD,
    PROMPT_LATE,
    PROMPT_NOW,
    SCHEDULE,
    UPLOADS,
    Copies,
    Copy,
    copies,
    on_one_stream,
    steps,
    times,
    waits,
)
from tests.acceptance.plain import PlainModel, requests
from tests.acceptance.runs import digest, digest_of, resolved, result_of, statuses

LOOPS = ("engine.overlap=true", "engine.overlap=false")


@torch.no_grad()
def plain_digest(*overrides: str) -> str:
    question = resolved("embedding", *overrides)
    plain = PlainModel(question, Embedder)

    def embedding(tokens: list[int]) -> list[float]:
        output = plain.model.forward(plain.batch(tokens))
        return (output.logits[0] if output.fingerprint is None else output.fingerprint).tolist()

    rows = [(r.id, [PLACEHOLDER, *embedding(r.origin_input_ids.tolist())]) for r in requests(question)]
    return digest_over(rows)


@pytest.mark.parametrize("values", ["none", "real"])
def test_every_embedding_equals_that_of_the_prompt_alone(values: str) -> None:
    mode = f"device.values={values}"
    meant = plain_digest(mode)
    for loop in LOOPS:
        result = result_of("embedding", mode, loop, hazards=True)
        assert statuses(result) == {"finished"} and set(result.per_step) == {"prefill"}
        assert digest_of(result) == meant


@pytest.mark.parametrize("setting", ["engine.page_size=16", "engine.radix_cache=false", "engine.replicas=2"])
def test_no_setting_changes_an_embedding(setting: str) -> None:
    assert digest("embedding", "device.values=none", setting) == plain_digest("device.values=none")


FIXED = ("device.values=none", "engine.radix_cache=false", "engine.chunked_prefill_size=none")
EMBEDDED: Copies = {Copy("launch_embedding", FORWARD, "d2h", "pinned nb"): 1}
READ: Copies = {Copy("settle_embedding", SCHEDULE, "d2h", "pageable B"): 1}


@pytest.mark.wide
@pytest.mark.parametrize("state", [name for name in states() if name != "latest"])
def test_copies_of_a_step_in_every_state(state: str) -> None:
    """#25945 moves the prompt's copy to the forward stream; the rest is as in any prefill."""
    prompt = {PROMPT_LATE if state == "pr25945" else PROMPT_NOW: 1}
    result = result_of("embedding", *FIXED, f"engine.relay={state}", hazards=True)
    count = steps(result, "prefill")
    assert copies(result, "prefill") == times(count, UPLOADS | EXTEND_LENS | prompt | EMBEDDED)
    assert waits(result, "prefill")["settle_embedding", FORWARD, "cudaEventSynchronize"] == count
    serial = result_of("embedding", *FIXED, f"engine.relay={state}", "engine.overlap=false")
    expected = on_one_stream(UPLOADS | EXTEND_LENS | prompt) | READ
    assert copies(serial, "prefill") == times(steps(serial, "prefill"), expected)


def test_a_request_ends_with_its_prompt_whatever_its_output_tokens() -> None:
    more = ("device.values=none", "workload.output_tokens=5000", "workload.sampling.stop_token_ids=[0]")
    result = result_of("embedding", *more)
    assert {request.reason for request in result.requests} == {"length"}
    assert digest_of(result) == digest("embedding", more[0])
