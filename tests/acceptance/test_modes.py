"""Each mode once, in one state of the ladder and in ``latest``; ``make wide`` covers all states."""

from __future__ import annotations

import pytest

from schedbench.cli.result_page import labels
from tests.acceptance.runs import digest, result_of

FEW = (
    "workload.requests=4",
    "workload.prompt_tokens.max=100",
    "workload.output_tokens.max=16",
    "measure.warmup_requests=0",
)
PLAIN = {
    "spec_v1": "engine.speculative=none",
    "spec_v2": "engine.speculative=none",
    "spec_grammar": "engine.speculative=none",
    "hisparse": "engine.hisparse={enabled: false}",
}


@pytest.mark.wide
@pytest.mark.parametrize("scenario", PLAIN)
def test_a_mode_finishes_every_request(scenario: str) -> None:
    digests = {relay: digest(scenario, *FEW, f"engine.relay={relay}") for relay in ("pr25945", "latest")}
    assert digests == dict.fromkeys(digests, digest(scenario, *FEW, PLAIN[scenario]))


@pytest.mark.parametrize(("scenario", "loop"), [("spec_v1", "serial"), ("spec_grammar", "overlapped")])
def test_auto_records_the_loop_that_it_chose(scenario: str, loop: str) -> None:
    result = result_of(scenario, *FEW)
    assert result.scenario.expanded["engine"]["overlap"] == "auto"
    assert result.relay.loop == loop
    assert f"relay pr25945, {loop}" in labels(result.document())
