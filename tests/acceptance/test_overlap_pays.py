"""The overlapped loop is faster, and the metrics of idle time explain why."""

from __future__ import annotations

import pytest

from schedbench.profiles.record.result import IdlePart, Result
from tests.acceptance.runs import known_result, value

# A smaller workload than the shipped pair's, with a running batch that stays full too.
LESS = (
    "workload.requests=32",
    "workload.arrival.concurrency=16",
    "workload.output_tokens={dist: uniform, min: 32, max: 64}",
)


def run(scenario: str) -> Result:
    return known_result(scenario, *LESS)


def idle(result: Result) -> IdlePart:
    assert isinstance(result.idle, IdlePart)
    return result.idle


def exposed(result: Result) -> float:
    """Microseconds per step in which the device was idle because of the host."""
    return value(result, "exposed_stall_us_per_step") + value(result, "exposed_host_us_per_step")


def test_overlap_hides_host_time_and_raises_the_throughput() -> None:
    overlapped, serial = run("overlap_on"), run("overlap_off")
    assert value(overlapped, "output_throughput") > 1.01 * value(serial, "output_throughput")
    assert exposed(overlapped) < exposed(serial) / 5
    assert idle(overlapped).host_late_us < idle(serial).host_late_us / 5
    assert value(overlapped, "forward_occupancy") > value(serial, "forward_occupancy")


@pytest.mark.parametrize("scenario", ["overlap_on", "overlap_off"])
def test_idle_time_is_accounted_for(scenario: str) -> None:
    result = run(scenario)
    parts = idle(result)
    steps = sum(counts.steps for kind, counts in result.per_step.items() if kind != "decode.steady")
    total = parts.host_late_us + parts.dependency_us + parts.kernel_gap_us + parts.residue_us
    assert parts.residue_us == parts.unnamed_host_us == 0
    assert total == pytest.approx(value(result, "forward_idle_us_per_step") * steps, rel=1e-9)
