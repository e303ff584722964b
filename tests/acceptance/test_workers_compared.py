"""The serial and the overlapped worker at equal acceptance: either can be the faster one."""

from __future__ import annotations

import pytest

from tests.acceptance.runs import result_of, value

pytestmark = pytest.mark.wide

CASE = "cases/eagle-v1-vs-naive-v2"
V1 = ("engine.overlap=false", "engine.speculative.mode=v1")
V2 = ("engine.overlap=true", "engine.speculative.mode=v2")


def gain(*overrides: str) -> float:
    """Returns the relative gain of v2 over v1 in output throughput."""
    v1, v2 = (result_of(CASE, *worker, *overrides) for worker in (V1, V2))
    assert value(v1, "accept_length") == pytest.approx(value(v2, "accept_length"), rel=1e-3)
    return value(v2, "output_throughput") / value(v1, "output_throughput") - 1


def test_short_answers_of_one_client_lose_by_the_surplus_verify() -> None:
    gains = [
        gain(f"workload.output_tokens={tokens}", "workload.requests=8", "workload.prompt_tokens=64")
        for tokens in (8, 32, 128)
    ]
    assert gains == sorted(gains)
    assert gains[0] < -0.1 < 0 < gains[-1]


def test_many_clients_fill_the_surplus_verify() -> None:
    many = (
        "engine.max_running_requests=32",
        "engine.kv_tokens=32768",
        "workload.arrival.concurrency=32",
        "workload.requests=96",
    )
    assert gain("workload.output_tokens=16", "workload.prompt_tokens=64", *many) > 0


def test_overlap_gains_most_where_the_host_is_the_bottleneck() -> None:
    assert gain("model.preset=qwen3-0.6b") > 0.15
