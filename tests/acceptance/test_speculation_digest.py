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
WORKERS = pytest.mark.parametrize("worker", [V1, V2], ids=["v1", "v2"])
# Short prompts and long outputs in a pool that had room for the prompts.
SHORT = (
    *SMALL,
    "workload.prompt_tokens.max=40",
    "workload.output_tokens=60",
    "workload.shared_prefix={groups: 1, tokens: 4}",
    "workload.requests=12",
)
TIGHT = ("engine.kv_tokens=336", "engine.schedule_conservativeness=0.01")

KNOBS = (
    ("engine.page_size=16",),
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


@WORKERS
@pytest.mark.parametrize("knob", KNOBS, ids=" ".join)
def test_no_knob_changes_a_token(worker: tuple[str, ...], knob: tuple[str, ...]) -> None:
    assert digest_of(result_of("mixed", *SMALL, *worker, *knob)) == reference(*SMALL)


@pytest.mark.parametrize(
    ("worker", "state", "page"),
    [
        (V1, "pr25945", 1),
        (V1, "latest", 16),
        (TREE, "latest", 1),
        (V2, "pr25774-before", 1),
        (V2, "pr25944", 16),
        (V2, "latest", 1),
        (V2, "latest", 16),
    ],
)
def test_retraction_changes_no_token(worker: tuple[str, ...], state: str, page: int) -> None:
    result = result_of("mixed", *SHORT, *worker, *TIGHT, f"engine.relay={state}", f"engine.page_size={page}")
    assert value(result, "retractions") > 0
    assert digest_of(result) == reference(*SHORT)


@pytest.mark.parametrize("state", ["pr25774", "pr25944-before", "pr26425", "latest"])
def test_the_overlapped_worker_runs_in_the_serial_loop_too(state: str) -> None:
    serial = result_of("mixed", *SMALL, *V2, "engine.overlap=false", f"engine.relay={state}")
    assert digest_of(serial) == reference(*SMALL)


@pytest.mark.parametrize("value", ["blocking", "private", "bound"])
def test_no_policy_of_host_lengths_changes_a_token(value: str) -> None:
    relay = f"engine.relay={{state: pr25945, seq_lens_cpu: {value}}}"
    assert digest_of(result_of("mixed", *SMALL, *V2, relay)) == reference(*SMALL)


@pytest.mark.parametrize("tokens", [2, 5, 16])
def test_draft_trees_change_no_token(tokens: int) -> None:
    tree = f"engine.speculative={{algorithm: eagle, mode: v1, topk: 3, draft_tokens: {tokens}}}"
    assert digest_of(result_of("mixed", *SMALL, "engine.overlap=false", tree)) == reference(*SMALL)


EXACT = "engine.relay={state: pr25945, penalties: exact}"
PENALISED = "workload.sampling={frequency_penalty: 0.7, presence_penalty: 0.3, repetition_penalty: 1.2}"


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


SAMPLING = {
    "keyed": ("workload.sampling={temperature: 0.8}",),
    "filtered": ("workload.sampling={temperature: 0.7, top_p: 0.9, top_k: 40, logprobs: true}",),
    "penalties": (
        "workload.sampling={frequency_penalty: 0.7, presence_penalty: 0.3, repetition_penalty: 1.2, "
        "min_new_tokens: 5, ignore_eos: false}",
        "engine.relay={state: pr25945, penalties: exact}",
    ),
    "grammar": (
        "workload.sampling={temperature: 0.7, ignore_eos: false, grammar: {regex: '-?[0-9]{1,12}'}}",
    ),
    "float64": ("model={preset: tiny-llama-eagle, dtype: float64}",),
}


@pytest.mark.parametrize("worker", [V1, V2, TREE], ids=["v1", "v2", "tree"])
@pytest.mark.parametrize("kind", SAMPLING)
def test_no_sampling_changes_a_token(worker: tuple[str, ...], kind: str) -> None:
    assert digest_of(result_of("mixed", *SMALL, *worker, *SAMPLING[kind])) == reference(
        *SMALL, *SAMPLING[kind]
    )


def test_retraction_under_exact_penalties_changes_no_token() -> None:
    """The penalties of a returning request count the tokens that it already has."""
    result = result_of("mixed", *SHORT, *V2, *SAMPLING["penalties"], *TIGHT)
    assert value(result, "retractions") > 0
    assert digest_of(result) == reference(*SHORT, *SAMPLING["penalties"])


def test_a_worse_draft_costs_acceptance_and_no_token() -> None:
    accepted = []
    for scale in (0.0, 0.1, 1.0):
        other = (f"model={{preset: tiny-llama-eagle, deeper_scale: {scale}}}",)
        result = result_of("mixed", *SMALL, *V2, *other)
        assert digest_of(result) == reference(*SMALL, *other)
        accepted.append(value(result, "accept_length"))
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[0] > 2.8 > 1.2 > accepted[-1]
