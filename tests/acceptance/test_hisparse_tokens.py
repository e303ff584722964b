"""With KV on the host the tokens are those of the same model with all KV on the device, with any other setting."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from schedbench.profiles.record.result import Result
from schedbench.sched.relay.states import states
from tests.acceptance.runs import OUTGROWING, digest_of, known_digest, known_result, statuses, value

pytestmark = pytest.mark.wide

SMALL = (*OUTGROWING, "engine.max_running_requests=5", "engine.relay=latest")
MODES = ("model.dtype=float32", "model.dtype=float64", "device.values=none")
ON_THE_DEVICE = ("engine.hisparse={enabled: false}", "engine.overlap=false", "engine.kv_tokens=8192")
LOOPS = ("engine.overlap=true", "engine.overlap=false")
# The host stores no more than the device, and admission expects no growth of requests.
TIGHT = (
    "engine.kv_tokens=512",
    "engine.hisparse.host_ratio=1.0",
    "engine.schedule_conservativeness=0.01",
)
LONG = ("workload.output_tokens={dist: uniform, min: 30, max: 60}",)

AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "loop": (("engine.overlap=false",),),
    "relay": tuple((f"engine.relay={name}",) for name in states() if name != "latest"),
    "backup": tuple(
        (f"engine.relay={{state: {state}, backup_indices: {how}}}",)
        for state, how in (("pr25945", "none"), ("pr26425", "pinned"), ("latest", "blocking"))
    ),
    "barrier": (("engine.relay={state: latest, barrier: top}",),),
    "chunk": (("engine.chunked_prefill_size=none",), ("engine.chunked_prefill_size=32",)),
    "page": (("engine.page_size=1",), ("engine.page_size=48",)),
    "buffer": (
        ("engine.hisparse.device_buffer_size=32",),
        ("engine.hisparse.device_buffer_size=256",),
    ),
    "ratio": (("engine.hisparse.host_ratio=5.5",),),
    "running": (("engine.max_running_requests=1",),),
    "graph": (("engine.cuda_graph=false",),),
    "kv": (TIGHT,),
}


def run(*overrides: str) -> Result:
    result = known_result("hisparse", *SMALL, *overrides)
    assert statuses(result) == {"finished"}
    return result


def reference(*overrides: str) -> str:
    """The tokens with all KV on the device."""
    return known_digest("hisparse", *SMALL, *overrides, *ON_THE_DEVICE)


def drawn(seed: int) -> list[str]:
    dice = random.Random(seed)
    found = [override for options in AXES.values() for override in dice.choice([(), *options])]
    return [override for override in found if not override.startswith("engine.hisparse.device_buffer_size")]


@pytest.mark.parametrize(
    ("mode", "overrides"),
    [
        *((mode, [loop]) for mode in MODES for loop in LOOPS),
        *((MODES[0], option) for options in AXES.values() for option in options),
        *((MODES[seed % len(MODES)], drawn(seed)) for seed in range(6)),
    ],
    ids=str,
)
def test_no_combination_of_knobs_changes_a_token(mode: str, overrides: Sequence[str]) -> None:
    assert digest_of(run(mode, *overrides)) == reference(mode)


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("state", ["pr26425", "latest"])
def test_retraction_changes_no_token(mode: str, loop: str, state: str) -> None:
    result = run(mode, loop, *LONG, *TIGHT, f"engine.relay={state}", "engine.kv_tokens=336")
    assert value(result, "retractions") > 0
    assert digest_of(result) == reference(mode, *LONG)


@pytest.mark.parametrize("state", ["pr26425", "latest"])
def test_exact_penalties_count_tokens_sampled_before_staging(state: str) -> None:
    penalised = ("workload.sampling.frequency_penalty=0.7", "workload.sampling.repetition_penalty=1.3")
    relay = f"engine.relay={{state: {state}, penalties: exact}}"
    assert digest_of(run(*penalised, relay)) == reference(*penalised) != reference(MODES[0])


def test_grammars_continue_after_staging() -> None:
    spelled = ("workload.sampling.grammar={regex: '[0-9]{1,30}'}", "workload.sampling.ignore_eos=false")
    assert digest_of(run(*spelled)) == reference(*spelled)


def test_the_indexers_choice_matters() -> None:
    """If the choice were always the same, a wrong position would hardly change a token."""
    assert reference("model.seed=1") != reference(MODES[0])
    assert 0.05 < value(run(MODES[0]), "hisparse_hit_ratio") < 0.95
