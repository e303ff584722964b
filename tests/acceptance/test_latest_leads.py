"""The best known state is never behind upstream's last one, and ahead of it wherever that one keeps the device waiting."""

from __future__ import annotations

import pytest

from schedbench.profiles.result import Result
from tests.acceptance.questions import SMALL, answer, value

FEW = ("workload.requests=12", "measure.warmup_requests=0")
DECODES = ("workload.requests=40", "workload.output_tokens.value=24", "measure.warmup_requests=0")
SHIPPED = {
    "mixed": SMALL,
    "penalties": FEW,
    "grammar": FEW,
    "retraction": FEW,
    "shared_prefix": FEW,
    "prefill_heavy": ("workload.requests=24", "measure.warmup_requests=0"),
}


@pytest.mark.parametrize("barrier", ["top", "off"])
@pytest.mark.parametrize("scenario", SHIPPED)
def test_latest_is_never_behind(scenario: str, barrier: str) -> None:
    upstream = answer(scenario, *SHIPPED[scenario], f"engine.relay={{state: pr25945, barrier: {barrier}}}")
    latest = answer(scenario, *SHIPPED[scenario], "engine.relay=latest")
    lead = value(latest, "output_throughput") / value(upstream, "output_throughput")
    assert lead >= 1
    assert lead > 1.001 or exposed(upstream) < 1.0


def exposed(result: Result) -> float:
    """µs per step for which the device waited for the host."""
    return value(result, "exposed_stall_us_per_step") + value(result, "exposed_host_us_per_step")
