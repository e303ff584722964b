"""Decoding with an encoder: tokens, the attention itself, and the copies of each state."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import softmax

from schedbench.profiles.platform.resolve import Resolved
from schedbench.sched.model.decoder import CrossDecoder
from schedbench.sched.model.weights import seeded_weights
from schedbench.sched.relay.states import states
from tests.acceptance.cells import (
    EXTEND_LENS,
    FORWARD,
    PROMPT_LATE,
    PROMPT_NOW,
    RESULT,
    SCHEDULE,
    UPLOADS,
    Copies,
    Copy,
    copies,
    steps,
    times,
)
from tests.acceptance.plain import CPU, PlainModel, requests
from tests.acceptance.runs import digest, digest_of, resolved, result_of, statuses
from tests.scenarios.refusals import refused

FEW = ("workload.requests=6", "workload.output_tokens.max=8", "measure.warmup_requests=0")
LOOPS = ("engine.overlap=true", "engine.overlap=false")


@torch.no_grad()
def plain_digest(*overrides: str) -> str:
    question = resolved("encoder_decoder", *overrides)
    return PlainModel(question, CrossDecoder).digest(requests(question))


@pytest.mark.parametrize("values", ["none", "real"])
def test_the_tokens_are_those_of_every_request_alone(values: str) -> None:
    few = (*FEW, f"device.values={values}")
    meant = plain_digest(*few)
    for loop in LOOPS:
        for state in ("pr25945", "latest"):
            result = result_of("encoder_decoder", *few, loop, f"engine.relay={state}", hazards=True)
            assert statuses(result) == {"finished"}
            assert digest_of(result) == meant
            # As in the scenario: without the encoder's.
            assert result.workload.prompt_tokens.achieved.p95 <= 100


@pytest.mark.parametrize(
    "setting",
    ["engine.page_size=16", "engine.cuda_graph=false", "engine.data_parallel.ranks=2", "engine.replicas=2"],
)
def test_no_setting_changes_a_token(setting: str) -> None:
    none = (*FEW, "device.values=none")
    assert digest("encoder_decoder", *none, setting) == digest("encoder_decoder", *none)


@pytest.mark.wide
def test_all_states_have_one_digest() -> None:
    none = (*FEW, "device.values=none")
    found = {digest("encoder_decoder", *none, f"engine.relay={state}") for state in states()}
    assert found == {digest("encoder_decoder", *none)}


def test_tokens_are_the_same_after_a_retraction() -> None:
    tight = (
        *FEW,
        "device.values=none",
        "engine.kv_tokens=400",
        "engine.schedule_conservativeness=0.01",
        "workload.output_tokens={dist: uniform, min: 30, max: 50}",
    )
    result = result_of("encoder_decoder", *tight)
    assert result.metrics["retractions"].values[0] > 0
    assert digest("encoder_decoder", *tight) == digest("encoder_decoder", *tight, "engine.kv_tokens=4096")


# ---- the model ---------------------------------------------------------------------------------------------


def dense_logits(question: Resolved, encoder: list[int], tokens: list[int]) -> torch.Tensor:
    """The last token's logits by whole matrices: no pages, no tiles, no cache."""
    config = question.model
    weights = seeded_weights(config, seed=question.scenario.model.seed, device=CPU)
    outside = weights.embedding[torch.tensor(encoder)]
    x = weights.embedding[torch.tensor(tokens)]
    angles = weights.cos_sin[: len(encoder) + len(tokens)].unsqueeze(1)

    def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

    def heads(rows: torch.Tensor, layer: int, start: int) -> tuple[torch.Tensor, ...]:
        product = (normed(rows, weights.layers[layer].input_norm) @ weights.layers[layer].qkv).view(
            len(rows), -1, config.head_dim
        )
        q, k, v = product.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        cos, sin = angles[start : start + len(rows)].chunk(2, dim=-1)
        turned = []
        for part in (q, k):
            first, second = part.chunk(2, dim=-1)
            turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
        return *turned, v

    for index, layer in enumerate(weights.layers):
        cross = index in config.cross_layers
        q, k, v = heads(x, index, len(encoder))
        if cross:
            _, k, v = heads(outside, index, 0)
        each = config.num_heads // config.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(each, 1)) * config.head_dim**-0.5
        if not cross:
            scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", softmax(scores, -1), v.repeat_interleave(each, 1))
        x = x + mixed.flatten(1) @ layer.o
        gate, up = (normed(x, layer.post_norm) @ layer.gate_up).chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ layer.down
    return normed(x[-1], weights.norm) @ weights.lm_head


@torch.no_grad()
def test_a_forward_equals_whole_matrices() -> None:
    question = resolved("encoder_decoder")
    req = next(requests(question))
    ids = req.origin_input_ids.tolist()
    encoder, tokens = ids[: req.encoder_len], ids[req.encoder_len :]
    plain = PlainModel(question, CrossDecoder)
    logits = plain.logits(ids, encoder_len=req.encoder_len)
    torch.testing.assert_close(logits, dense_logits(question, encoder, tokens), rtol=1e-4, atol=1e-4)
    other = dense_logits(question, encoder[::-1], tokens)
    assert not torch.allclose(logits, other, atol=1e-2)


# ---- copies ------------------------------------------------------------------------------------------------

# The lengths of the encoder's and of the decoder's part; the encoder's ids.
STRIPPED: Copies = {
    Copy("_uploaded", SCHEDULE, "h2d", "pinned nb"): 2,
    Copy("_encoder_input", FORWARD, "h2d", "pinned nb"): 1,
}
FIXED = (*FEW, "device.values=none", "engine.cuda_graph=false")


@pytest.mark.parametrize("state", [name for name in states() if name != "latest"])
def test_copies_of_a_prefill_in_every_state(state: str) -> None:
    """Before #25945 the whole prompt is uploaded, and then the stripped one; after it, the stripped one alone."""
    prompt = {PROMPT_LATE: 1} if state == "pr25945" else {PROMPT_NOW: 2}
    result = result_of("encoder_decoder", *FIXED, f"engine.relay={state}")
    expected = UPLOADS | EXTEND_LENS | STRIPPED | prompt | RESULT
    assert copies(result, "prefill") == times(steps(result, "prefill"), expected)


def test_latest_strips_before_it_stages() -> None:
    result = result_of("encoder_decoder", *FIXED, "engine.relay=latest")
    found = copies(result, "prefill")
    count = steps(result, "prefill")
    assert found[PROMPT_NOW] == count
    assert found[Copy("_uploaded", SCHEDULE, "h2d", "pinned nb")] == count
    assert not any(copy.how.endswith("B") for copy in found)


def test_a_model_without_an_encoder_is_refused() -> None:
    [problem] = refused(resolved, "encoder_decoder", "model.preset=tiny-llama")
    assert "tiny-llama has no encoder" in problem
