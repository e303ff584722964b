"""Speculation under the hazard checker: each state shows its declared hazards, and the adversary changes no token."""

from __future__ import annotations

import pytest

from schedbench.profiles.check.adversaries import seeds
from schedbench.profiles.check.examine import Examiner
from schedbench.profiles.record.result import Hazards
from tests.acceptance.runs import executed, hazards_in, resolved
from tests.acceptance.test_speculation_digest import SMALL, TREE, V1, V2

pytestmark = pytest.mark.wide

EIGHT = (*SMALL, "workload.requests=8")


def found(*overrides: str) -> Hazards:
    return hazards_in(executed(resolved("mixed", *EIGHT, *overrides), hazards=True))


LATEST = (*V2, "engine.relay=latest")


@pytest.mark.parametrize(
    "overrides",
    [
        LATEST,
        (*LATEST, "engine.page_size=16"),
        (*LATEST, "engine.cuda_graph=false"),
        (*LATEST, "engine.chunked_prefill_size=64", "engine.radix_cache=false"),
        (*LATEST, "engine.kv_tokens=400", "engine.schedule_conservativeness=0.01"),
        (*LATEST, "workload.sampling.frequency_penalty=0.5"),
        (*LATEST, "workload.sampling={temperature: 0.7, ignore_eos: false, grammar: {regex: '[0-9]{4,12}'}}"),
        (*LATEST, "device.values=none", "engine.speculative.acceptance={mean: 2.5}"),
        # on one stream
        V1,
        TREE,
        *((*worker, "engine.cuda_graph=false", "measure.warmup_requests=1") for worker in (V1, TREE)),
        *(
            (*V2, f"engine.relay={{state: pr25945, barrier: read-done, seq_lens_cpu: {policy}}}")
            for policy in ("blocking", "private", "bound")
        ),
    ],
    ids=" ".join,
)
def test_there_is_no_hazard(overrides: tuple[str, ...]) -> None:
    assert found(*overrides) == Hazards()


@pytest.mark.parametrize("state", ["pr25774-before", "pr25944", "pr25945", "latest"])
def test_every_check_passes(state: str) -> None:
    """Invariants, tokens against a run without speculation, hazards, and every strategy of the adversary."""
    question = resolved("mixed", *SMALL, *V2, f"engine.relay={state}", "workload.requests=5")
    [relay] = question.relays
    checks = Examiner(question, seeds(1)).examine(relay).checks
    assert {check.name: check.verdict for check in checks if check.verdict == "failed"} == {}
