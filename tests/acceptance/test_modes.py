"""Each mode once, in the state of the ladder before the last and in the best one: `make wide` asks all of them."""

from __future__ import annotations

import pytest

from tests.acceptance.questions import digest

FEW = ("workload.requests=6", "measure.warmup_requests=0")
PLAIN = {
    "spec_v1": "engine.speculative={algorithm: none}",
    "spec_v2": "engine.speculative={algorithm: none}",
    "spec_grammar": "engine.speculative={algorithm: none}",
    "hisparse": "engine.hisparse={enabled: false}",
}


@pytest.mark.parametrize("relay", ["pr25945", "latest"])
@pytest.mark.parametrize("scenario", PLAIN)
def test_a_mode_loses_no_token(scenario: str, relay: str) -> None:
    asked = (*FEW, f"engine.relay={relay}")
    assert digest(scenario, *asked) == digest(scenario, *asked, PLAIN[scenario])
