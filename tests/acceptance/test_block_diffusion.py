"""Block diffusion: tokens, the rule that chooses them, and the copies of each state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.record.result import digest as digest_over
from schedbench.sched.kernels.sampling import unmask_tagged
from schedbench.sched.model.decoder import BlockDecoder
from schedbench.sched.relay.choice import choose
from schedbench.sched.relay.states import states
from schedbench.sched.relay.tokens import keep_list
from schedbench.sched.request import Request
from tests.acceptance.cells import FORWARD, PROMPT_LATE, PROMPT_NOW, SCHEDULE, Copy, copies, steps
from tests.acceptance.plain import PlainModel, requests
from tests.acceptance.runs import digest, digest_of, each_state, known_digest, resolved, result_of, statuses

SIZE, MASK = 16, 511


class PlainDiffusion:
    """One request at a time; each block is computed by the rule written out token by token."""

    def __init__(self, question: Resolved) -> None:
        self._plain = PlainModel(question, BlockDecoder)
        self._threshold = question.scenario.engine.block_diffusion.threshold

    def outputs(self, req: Request) -> list[int]:
        tokens, start = req.origin_input_ids.tolist(), 0
        prompt, most = len(tokens), req.sampling.max_new_tokens
        while len(tokens) < prompt + most:
            known = tokens[start : start + SIZE]
            block = known + [MASK] * (SIZE - len(known))
            while MASK in block:
                block = self._pass(block, start)
            self._plain.model.forward(self._plain.batch(block, start=start))
            tokens[start:] = block if len(known) < SIZE else tokens[start:]
            start += SIZE
        return tokens[prompt : prompt + most]

    def _pass(self, block: Sequence[int], start: int) -> list[int]:
        output = self._plain.model.forward(self._plain.batch(block, start=start))
        if output.fingerprint is not None:
            ids = torch.tensor(block)
            unmask_tagged(ids, output.logits, output.fingerprint, MASK, self._threshold, SIZE)
            return ids.tolist()
        probabilities = output.logits[:, :MASK].double().softmax(1)
        sure, found = (part.tolist() for part in probabilities.max(1))
        masked = [place for place, token in enumerate(block) if token == MASK]
        best = max(masked, key=lambda place: sure[place])
        return [
            found[place] if place in masked and (place == best or sure[place] > self._threshold) else token
            for place, token in enumerate(block)
        ]


@torch.no_grad()
def plain_digest(*overrides: str) -> str:
    question = resolved("block_diffusion", *overrides)
    plain = PlainDiffusion(question)
    return digest_over([(req.id, plain.outputs(req)) for req in requests(question)])


@pytest.mark.parametrize("values", ["none", "real"])
def test_the_tokens_are_those_of_every_request_alone(values: str) -> None:
    few = (*NONE, f"device.values={values}")
    result = result_of("block_diffusion", *few, hazards=True)
    assert statuses(result) == {"finished"}
    assert digest_of(result) == plain_digest(*few)


NONE = ("device.values=none", "workload.requests=6", "measure.warmup_requests=0")


@pytest.mark.parametrize(
    "setting", ["engine.page_size=16", "engine.max_running_requests=2", "engine.kv_tokens=256"]
)
def test_no_setting_changes_a_token(setting: str) -> None:
    assert digest("block_diffusion", *NONE, setting) == latest_digest()


def test_a_request_whose_last_block_would_not_fit_is_refused() -> None:
    """30 + 23 tokens would fit the pool of 64, and four blocks do not."""
    lengths = ("workload.prompt_tokens=30", "workload.output_tokens=23", "engine.kv_tokens=64")
    result = result_of("block_diffusion", *NONE, *lengths)
    assert {row.reason for row in result.requests} == {
        "30 prompt + 23 new tokens + 11 for its last block "
        "exceed the 62 of the KV pool's 64 tokens that one request may have"
    }
    room = result_of("block_diffusion", *NONE, *lengths, "engine.kv_tokens=66")
    assert statuses(room) == {"finished"}


def test_a_pass_keeps_likely_tokens_and_the_likeliest() -> None:
    passes = {
        threshold: result_of("block_diffusion", *NONE, f"engine.block_diffusion.threshold={threshold}")
        for threshold in (0.0, 1.0)
    }
    reads = {at: copies(found, "prefill")[MASKS_LEFT] for at, found in passes.items()}
    blocks = steps(passes[0.0], "prefill")
    assert reads[0.0] < 2 * blocks < 4 * blocks < reads[1.0]


# Whether masks are left, once before every pass; a copy for each request that got tokens.
MASKS_LEFT = Copy("_found", SCHEDULE, "d2h", "pinned B")
TOKENS = Copy("settle_blocks", SCHEDULE, "d2h", "pageable B")


latest_digest = partial(known_digest, "block_diffusion", *NONE)


@pytest.mark.parametrize("state", each_state("pr25774-before", "pr25774", "pr25945", "latest"))
def test_tokens_are_downloaded_by_request_and_not_relayed(state: str) -> None:
    result = result_of("block_diffusion", *NONE, f"engine.relay={state}", hazards=True)
    found = copies(result, "prefill")
    count = steps(result, "prefill")
    late, now = PROMPT_LATE._replace(stream=SCHEDULE), PROMPT_NOW
    assert found.get(late if state == "pr25945" else now) == count
    assert found.get(now if state == "pr25945" else late) is None
    assert digest_of(result) == latest_digest()
    given = sum(-(-(row.prompt_tokens % SIZE + row.output_tokens) // SIZE) for row in result.requests)
    assert found[TOKENS] == given
    assert not any(copy.stream == FORWARD for copy in found)


def test_before_25774_tokens_are_kept_as_output_ids() -> None:
    rows = {name: choose(name, {}).row(overlap=False) for name in states()}
    assert [name for name, row in rows.items() if row.conclude_blocks is keep_list] == ["pr25774-before"]
