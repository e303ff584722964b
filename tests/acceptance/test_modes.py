"""The loop that ``auto`` chooses for a mode is in the result and on its page."""

from __future__ import annotations

import pytest

from schedbench.cli.result_page import labels
from tests.acceptance.runs import result_of

FEW = (
    "workload.requests=4",
    "workload.prompt_tokens.max=100",
    "workload.output_tokens.max=16",
    "measure.warmup_requests=0",
)


@pytest.mark.parametrize(("scenario", "loop"), [("spec_v1", "serial"), ("spec_grammar", "overlapped")])
def test_auto_records_the_loop_that_it_chose(scenario: str, loop: str) -> None:
    result = result_of(scenario, *FEW)
    assert result.scenario.expanded["engine"]["overlap"] == "auto"
    assert result.relay.loop == loop
    assert f"relay pr25945, {loop}" in labels(result.document())
