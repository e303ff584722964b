"""With speculation the tokens are those of the same scenario without it, bit for bit."""

from __future__ import annotations

import random
from functools import partial

import pytest

from schedbench.sched.relay.states import states
from tests.acceptance.runs import digest_of, known_digest, result_of, statuses, value

pytestmark = pytest.mark.wide

SMALL = (
    "model={preset: tiny-llama-eagle}",
    "engine.mixed_chunk=false",
    "workload.requests=6",
    "workload.arrival=burst",
    "workload.prompt_tokens.max=120",
    "workload.output_tokens.min=24",
    "measure.warmup_requests=0",
)
V1 = ("engine.overlap=false", "engine.speculative={algorithm: eagle, mode: v1}")
V2 = ("engine.speculative={algorithm: eagle, mode: v2}",)
TREE = ("engine.overlap=false", "engine.speculative={algorithm: eagle, mode: v1, topk: 3, draft_tokens: 8}")
# Short prompts and long outputs in a pool that had room for the prompts.
SHORT = (
    *SMALL,
    "workload.prompt_tokens.max=40",
    "workload.output_tokens=60",
    "workload.shared_prefix={groups: 1, tokens: 4}",
    "workload.requests=12",
)
TIGHT = ("engine.kv_tokens=336", "engine.schedule_conservativeness=0.01")

EXACT = "engine.relay={state: pr25945, penalties: exact}"
PENALISED = "workload.sampling={frequency_penalty: 0.7, presence_penalty: 0.3, repetition_penalty: 1.2}"
SAMPLING = {
    "keyed": ("workload.sampling={temperature: 0.8}",),
    "filtered": ("workload.sampling={temperature: 0.7, top_p: 0.9, top_k: 40, logprobs: true}",),
    "penalties": (
        PENALISED.replace("}", ", min_new_tokens: 5, ignore_eos: false}"),
        EXACT,
    ),
    "grammar": (
        "workload.sampling={temperature: 0.7, ignore_eos: false, grammar: {regex: '-?[0-9]{1,12}'}}",
    ),
    "float64": ("model={preset: tiny-llama-eagle, dtype: float64}",),
}

PAGES = "engine.page_size=16"
KNOBS = (
    (PAGES,),
    ("engine.chunked_prefill_size=64",),
    ("engine.chunked_prefill_size=none",),
    ("engine.radix_cache=false",),
    ("engine.cuda_graph=false",),
    ("engine.max_running_requests=2",),
    ("device.hardware=mlx-like",),
)


# Without speculation.
reference = partial(known_digest, "mixed")


# The serial worker's answers change with these states only.
V1_STATES = ("pr25774-before", "pr25774", "pr25944-before", "pr25945", "latest")


@pytest.mark.parametrize(
    ("worker", "state"), [*((V1, state) for state in V1_STATES), *((V2, state) for state in states())]
)
def test_no_state_changes_a_token(worker: tuple[str, ...], state: str) -> None:
    result = result_of("mixed", *SMALL, *worker, f"engine.relay={state}")
    assert digest_of(result) == reference(*SMALL)
    assert statuses(result) == {"finished"}
    assert value(result, "accept_length") > 2


@pytest.mark.parametrize(
    "overrides",
    [
        *((*worker, *knob) for worker in (V1, V2) for knob in KNOBS),
        # the overlapped worker in the serial loop
        *(
            (*V2, "engine.overlap=false", f"engine.relay={state}")
            for state in ("pr25774", "pr25944-before", "pr26425", "latest")
        ),
        *(
            (*V2, f"engine.relay={{state: pr25945, seq_lens_cpu: {policy}}}")
            for policy in ("blocking", "private", "bound")
        ),
        *((TREE[0], TREE[1].replace("draft_tokens: 8", f"draft_tokens: {size}")) for size in (2, 5, 16)),
    ],
    ids=" ".join,
)
def test_no_knob_changes_a_token(overrides: tuple[str, ...]) -> None:
    assert digest_of(result_of("mixed", *SMALL, *overrides)) == reference(*SMALL)


@pytest.mark.parametrize(
    ("overrides", "sampling"),
    [
        ((*V1, "engine.relay=pr25945"), ()),
        ((*V1, "engine.relay=latest", PAGES), ()),
        ((*TREE, "engine.relay=latest"), ()),
        ((*V2, "engine.relay=pr25774-before"), ()),
        ((*V2, "engine.relay=pr25944", PAGES), ()),
        ((*V2, "engine.relay=latest"), ()),
        ((*V2, "engine.relay=latest", PAGES), ()),
        # The penalties of a returning request count the tokens that it already has.
        (V2, SAMPLING["penalties"]),
    ],
)
def test_retraction_changes_no_token(overrides: tuple[str, ...], sampling: tuple[str, ...]) -> None:
    result = result_of("mixed", *SHORT, *overrides, *sampling, *TIGHT)
    assert value(result, "retractions") > 0
    assert digest_of(result) == reference(*SHORT, *sampling)


@pytest.mark.parametrize("seed", range(10))
def test_no_combination_of_knobs_changes_a_token(seed: int) -> None:
    """Any state, worker and loop, with any of the other settings, with and without exact penalties and a small pool."""
    dice = random.Random(seed)
    worker = [V1, V2, TREE, (*V2, "engine.overlap=false")][seed % 4]
    knobs = [override for knob in KNOBS if dice.random() < 0.4 for override in knob]
    knobs = [knob for knob in knobs if worker is not TREE or "page_size" not in knob]
    sampling = dice.choice([(), (PENALISED,)])
    relay = f"engine.relay={{state: {dice.choice(list(states()))}, penalties: exact}}"
    room = dice.choice([(), TIGHT])
    result = result_of("mixed", *SHORT, *worker, relay, *sampling, *room, *knobs)
    assert statuses(result) == {"finished"}
    assert digest_of(result) == reference(*SHORT, *sampling, *((EXACT,) if sampling else ()))


@pytest.mark.parametrize("worker", [V1, V2, TREE], ids=["v1", "v2", "tree"])
@pytest.mark.parametrize("kind", SAMPLING)
def test_no_sampling_changes_a_token(worker: tuple[str, ...], kind: str) -> None:
    assert digest_of(result_of("mixed", *SMALL, *worker, *SAMPLING[kind])) == reference(
        *SMALL, *SAMPLING[kind]
    )


def test_a_worse_draft_costs_acceptance_and_no_token() -> None:
    accepted = []
    for scale in (0.0, 0.1, 1.0):
        other = (f"model={{preset: tiny-llama-eagle, deeper_scale: {scale}}}",)
        result = result_of("mixed", *SMALL, *V2, *other)
        assert digest_of(result) == reference(*SMALL, *other)
        accepted.append(value(result, "accept_length"))
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[0] > 2.8 > 1.2 > accepted[-1]
