"""The metrics that are read of a result, by default and on request."""

from __future__ import annotations

from schedbench.profiles.judge.effects import metric_values
from tests.acceptance.runs import result_of


def test_other_percentiles_are_read_on_request() -> None:
    result = result_of("overlap_on", "workload.requests=12", "workload.output_tokens=4")
    unasked, asked = metric_values(result), metric_values(result, ("e2e_ms.p90",))
    assert {"e2e_ms", "e2e_ms.p50"} <= unasked.keys()
    assert asked.keys() - unasked.keys() == {"e2e_ms.p90"}
    assert unasked["e2e_ms.p50"].value <= asked["e2e_ms.p90"].value
