"""Speculation with disaggregated workers: the decode worker's draft continues from the prefill worker's."""

from __future__ import annotations

import pytest

from tests.acceptance.cells import SCHEDULE, Ask, Copies, Copy, copies, steps, times
from tests.acceptance.runs import digest, digest_of, known_result, result_of, statuses, value
from tests.acceptance.test_disagg_cells import PREBUILT, everywhere

PAIR = "engine.disaggregation={mode: pair, reserved_decode_tokens: 8}"
FEW = (
    "workload.requests=4",
    "workload.arrival=burst",
    "workload.output_tokens={dist: uniform, min: 8, max: 32}",
    "measure.warmup_requests=0",
)
V2 = ("pr25774-before", "pr25944-before", "pr25944", "pr26020", "pr26425", "pr25945", "latest")
SOON = ("pr25774-before", "pr25944")
LATER = {True: (), False: pytest.mark.wide}

PARTS: Copies = {Copy("upload", SCHEDULE, "h2d", "pageable B"): 3}


def reference(mode: str) -> tuple[str, float]:
    result = known_result(f"spec_{mode}", *FEW)
    return digest_of(result), value(result, "accept_length")


@pytest.mark.parametrize(
    ("mode", "way"),
    [
        *(pytest.param("v2", (f"engine.relay={state}",), marks=LATER[state in SOON]) for state in V2),
        pytest.param("v2", ("engine.overlap=false", "engine.page_size=16"), marks=pytest.mark.wide),
        ("v2", ("engine.disaggregation.prefill=2", "engine.disaggregation.decode=2")),
        ("v1", ("engine.relay=pr25774-before",)),
        pytest.param("v1", ("engine.relay=pr25945",), marks=pytest.mark.wide),
        pytest.param("v1", ("engine.relay=latest",), marks=pytest.mark.wide),
    ],
)
def test_tokens_and_acceptance_equal_those_of_one_worker(mode: str, way: tuple[str, ...]) -> None:
    result = result_of(f"spec_{mode}", *FEW, PAIR, *way)
    assert statuses(result) == {"finished"}
    assert (digest_of(result), value(result, "accept_length")) == reference(mode)


def test_retraction_to_the_host_changes_no_token() -> None:
    result = result_of("spec_v2", *FEW, PAIR, "engine.kv_tokens=384")
    assert value(result, "retractions") > 0
    assert digest_of(result) == reference("v2")[0]


@pytest.mark.wide
def test_simulated_acceptance_is_the_same() -> None:
    lots = ("device.values=none", "engine.speculative.acceptance={mean: 2.5}")
    assert value(result_of("spec_v2", *FEW, PAIR, *lots), "accept_length") == value(
        result_of("spec_v2", *FEW, *lots), "accept_length"
    )


@pytest.mark.wide
def test_grammars_work_with_disaggregation() -> None:
    few = ("workload.requests=6", "engine.relay=latest")
    assert digest("spec_grammar", *few, PAIR) == digest("spec_grammar", *few)


@pytest.mark.parametrize("state", ["pr26425", "pr25945"])
def test_a_prebuilt_batch_has_three_more_uploads(ask: Ask, state: str) -> None:
    speculates = "engine.speculative={algorithm: eagle, mode: v2}"
    result = ask(
        [(40, 12, 0)] * 3, PAIR, "model.preset=tiny-llama-eagle", speculates, f"engine.relay={state}"
    )
    assert copies(result, "prebuilt") == times(steps(result, "prebuilt"), PREBUILT | PARTS)


@pytest.mark.parametrize("mode", ["v2", pytest.param("v1", marks=pytest.mark.wide)])
def test_the_state_of_a_draft_costs_three_blocking_downloads_per_request(ask: Ask, mode: str) -> None:
    speculates = f"engine.speculative={{algorithm: eagle, mode: {mode}}}"
    result = ask([(40, 12, 0)] * 3, PAIR, "model.preset=tiny-llama-eagle", speculates)
    assert everywhere(result, "_settle_extend") == {("d2h", True, "pageable"): 3 * 3}
