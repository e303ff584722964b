"""Log probabilities of prompts and outputs: their values, and their copies in each state."""

from __future__ import annotations

import pytest
import torch

from schedbench.sched.observe import Observer
from schedbench.sched.relay.states import states
from schedbench.sched.request import Request
from tests.acceptance.cells import FORWARD, RESULT, Copy, copies, steps
from tests.acceptance.plain import PlainModel, requests
from tests.acceptance.runs import digest_observed, resolved, result_of

FEW = ("workload.requests=4", "measure.warmup_requests=0")
UNSCORED = ("workload.sampling.logprobs=false", "workload.sampling.prompt_logprobs=false")
[DOWNLOAD] = RESULT
TARGETS = Copy("_prompt_targets", FORWARD, "h2d", "pageable nb")


@pytest.mark.wide
@pytest.mark.parametrize("state", states())
def test_copies_of_a_step_in_every_state(state: str) -> None:
    """No step is mixed; besides the tokens a prefill downloads its own log probabilities and the prompts'."""
    relay = f"engine.relay={state}"
    result = result_of("logprobs", *FEW, relay, hazards=True)
    assert result.outputs == result_of("logprobs", *FEW, relay, "engine.overlap=false").outputs
    prefills, decodes = steps(result, "prefill"), steps(result, "decode")
    assert "mixed" not in result.per_step
    made = copies(result, "prefill")
    assert (made[TARGETS], made[DOWNLOAD]) == (prefills, 3 * prefills)
    assert copies(result, "decode")[DOWNLOAD] == 2 * decodes


class Scores(Observer):
    def __init__(self) -> None:
        self.of_prompts: dict[str, list[float]] = {}
        self.ended_requests: list[Request] = []

    def ended(self, request: Request) -> None:
        self.of_prompts[request.id] = request.prompt_logprobs
        self.ended_requests.append(request)


@torch.no_grad()
def plain_scores(*overrides: str) -> dict[str, list[float]]:
    question = resolved("logprobs", *overrides)
    plain = PlainModel(question)
    found: dict[str, list[float]] = {}
    for request in requests(question):
        ids = request.origin_input_ids.tolist()
        batch = plain.batch(ids)
        batch.prompt_targets = torch.tensor([*ids[1:], 0])
        scores = plain.model.forward(batch).prompt_logprobs
        assert scores is not None
        found[request.id] = scores.tolist()[:-1]
    return found


@pytest.mark.parametrize("loop", ["engine.overlap=true", "engine.overlap=false", "engine.deferred=true"])
def test_scores_are_those_of_one_whole_forward(loop: str) -> None:
    seen = Scores()
    digest_observed(resolved("logprobs", *FEW, loop), lambda *_: seen)
    assert seen.of_prompts == plain_scores(*FEW)


STATES = (*UNSCORED, "workload.sampling.hidden_states=true")


@torch.no_grad()
def whole_states(request: Request, plain: PlainModel) -> list[list[float]]:
    """Returns the hidden states of a request's prompt and of its tokens except the last, which is never computed."""
    batch = plain.batch([*request.origin_input_ids, *request.output_ids][:-1])
    batch.capture_hidden = True
    states = plain.model.forward(batch).hidden_states
    assert states is not None
    found: list[list[float]] = states.tolist()
    return found


@pytest.mark.parametrize("loop", ["engine.overlap=true", "engine.overlap=false"])
@pytest.mark.parametrize("cache", [True, False])
def test_hidden_states_are_those_of_one_whole_forward(loop: str, cache: bool) -> None:
    seen = Scores()
    question = resolved("logprobs", *FEW, *STATES, loop, f"engine.radix_cache={str(cache).lower()}")
    digest_observed(question, lambda *_: seen)
    plain = PlainModel(question)
    for request in seen.ended_requests:
        first = min(request.hidden_states)
        assert first == 0 or cache
        whole = whole_states(request, plain)
        assert request.hidden_states == dict(enumerate(whole[first:], first))


@pytest.mark.parametrize("state", ["pr25945", "latest"])
def test_hidden_states_are_one_more_copy(state: str) -> None:
    result = result_of("logprobs", *FEW, *STATES, f"engine.relay={state}", hazards=True)
    assert result.outputs == result_of("logprobs", *FEW, *UNSCORED).outputs
    for kind in result.per_step.keys() - {"decode.steady"}:
        assert copies(result, kind)[DOWNLOAD] == 2 * steps(result, kind)
