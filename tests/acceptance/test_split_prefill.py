"""Prompts that run in parts beside decodes, on shares of the GPU: tokens, order, and the copies of each state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import pytest

from schedbench.profiles.record.result import Hazards
from schedbench.sched.observe import Clock, Observer, StepInfo
from schedbench.sched.relay.states import SPLIT_TOKENS, states
from schedbench.sched.request import Request
from tests.acceptance.cells import PROMPT_LATE, PROMPT_NOW, READ, copies, steps
from tests.acceptance.runs import digest_observed, known_result, prepared_run, resolved, result_of, value

FEW = ("device.values=none", "workload.requests=8", "measure.warmup_requests=0")
WHOLE = "engine.split_prefill.enabled=false"


plain = partial(known_result, "split_prefill", WHOLE, "engine.overlap=false", "engine.relay=latest")


@pytest.mark.wide
@pytest.mark.parametrize("state", states())
def test_every_state_gives_the_tokens_of_the_serial_loop(state: str) -> None:
    """Before #25945 sampled tokens stay in the batch and are freed while another stream reads them."""
    result = result_of("split_prefill", *FEW, f"engine.relay={state}", hazards=True)
    assert result.outputs == plain(*FEW).outputs
    assert result.relay.loop == "multiplexed"
    assert isinstance(result.hazards, Hazards)
    if state == "pr25774":
        assert result.hazards.known == (SPLIT_TOKENS,)
    if state in ("pr25774-before", "pr25945", "latest"):
        assert not result.hazards.known


REAL = ("device.values=real", "workload.requests=5", "measure.warmup_requests=0")


@pytest.mark.wide
@pytest.mark.parametrize(
    "mode",
    [
        "workload.sampling.frequency_penalty=0.5",
        "workload.sampling.grammar={regex: '[0-9]{1,8}'}",
        "workload.sampling.logprobs=true",
        "workload.sampling.temperature=0.8",
        "engine.page_size=16",
        "engine.radix_cache=false",
    ],
)
def test_no_mode_changes_a_token(mode: str) -> None:
    latest = "engine.relay=latest"
    assert result_of("split_prefill", *REAL, mode, latest, hazards=True).outputs == plain(*REAL, mode).outputs


@pytest.mark.parametrize("setting", ["device.hardware=mlx-like", "engine.max_running_requests=1"])
def test_one_queue_and_one_request_at_a_time_have_the_same_tokens(setting: str) -> None:
    assert result_of("split_prefill", *FEW, setting).outputs == plain(*FEW).outputs


def test_a_small_pool_changes_no_token() -> None:
    tight = ("engine.kv_tokens=256", "engine.schedule_conservativeness=0.01", "workload.arrival=burst")
    long = (
        "workload.prompt_tokens=8",
        "workload.shared_prefix=null",
        "workload.output_tokens={dist: uniform, min: 100, max: 120}",
    )
    result = result_of("split_prefill", *FEW, *long, *tight)
    assert value(result, "retractions") > 0
    assert result.outputs == plain(*FEW, *long).outputs


class DecodesDuringPrompts(Observer):
    """Counts the decodes launched during each prompt."""

    def __init__(self) -> None:
        self.decodes: dict[int, int] = {}
        self._prompts: set[int] = set()

    def launched(self, info: StepInfo) -> None:
        if info.kind == "prefill":
            self._prompts.add(info.step)
            self.decodes[info.step] = 0
        for step in self._prompts if info.kind == "decode" else ():
            self.decodes[step] += 1

    def settled(self, info: StepInfo) -> None:
        self._prompts.discard(info.step)


LARGE = (
    *FEW,
    "model.preset=llama-3-8b",
    "engine.kv_tokens=16384",
    "workload.prompt_tokens=900",
    "workload.output_tokens=24",
    "workload.arrival={process: constant, rate: 20}",
    "engine.split_prefill.token_budget=2048",
)


def test_decodes_continue_during_a_prompt() -> None:
    seen = DecodesDuringPrompts()
    digest_observed(resolved("split_prefill", *LARGE), lambda *_: seen)
    assert max(seen.decodes.values()) >= 8


class Gaps(Observer):
    """Records the longest time between two tokens of a request, ns."""

    def __init__(self, clock: Clock) -> None:
        self.longest = 0
        self._clock = clock
        self._last: dict[str, int] = {}

    def tokens(self, requests: Sequence[Request], count: int) -> None:  # noqa: ARG002
        now = self._clock.now()
        for request in requests:
            self.longest = max(self.longest, now - self._last.get(request.id, now))
            self._last[request.id] = now


def longest_gap(*overrides: str) -> int:
    with prepared_run(resolved("split_prefill", *LARGE, *overrides)) as (machine, composed):
        seen = Gaps(machine.clock)
        composed.measure(lambda *_: nullcontext(seen))
    return seen.longest


def test_split_prefill_shortens_the_longest_gap_between_tokens() -> None:
    assert longest_gap() < longest_gap(WHOLE, "engine.overlap=false")


PROMPT = {False: PROMPT_NOW, True: PROMPT_LATE}


@pytest.mark.parametrize("state", ["pr25774-before", "pr25774", "pr25945-before", "pr25945"])
def test_copies_of_a_step_in_the_states_around_each_pull_request(state: str) -> None:
    """#25945 moves the prompt's copy to the forward stream, with the first part."""
    ends = ("workload.arrival=burst", "workload.output_tokens=6", "workload.shared_prefix=null")
    result = result_of("split_prefill", *FEW, *ends, f"engine.relay={state}")
    count = steps(result, "prefill")
    made = copies(result, "prefill")
    assert {copy: made[copy] for copy in made if copy in PROMPT.values()} == {
        PROMPT[state == "pr25945"]: count
    }
    assert made[READ] == count
    assert copies(result, "decode")[READ] == steps(result, "decode")
