"""From scenario to requests: arrivals, closed loops, determinism, shared content."""

from __future__ import annotations

from schedbench.scenarios.loader import load
from schedbench.scenarios.workload import Workload, build


def mixed(*overrides: str, seed: int = 0) -> Workload:
    return build(load("mixed", overrides), vocab_size=512, context_len=4096, seed=seed)


def test_equal_seeds_give_equal_requests() -> None:
    first, second = list(mixed().upcoming()), list(mixed().upcoming())

    assert [request.origin_input_ids for request in first] == [request.origin_input_ids for request in second]
    assert [request.arrival for request in first] == [request.arrival for request in second]


def test_a_burst_arrives_at_once() -> None:
    assert {request.arrival for request in mixed("workload.arrival=burst").upcoming()} == {0}
