"""The allowed number of ranks of a scenario."""

from __future__ import annotations

import pytest

from schedbench.scenarios.loader import load
from schedbench.scenarios.problems import ScenarioError

KEYS = (
    "disaggregation.prefill",
    "disaggregation.decode",
    "replicas",
    "data_parallel.ranks",
    "pipeline.stages",
)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("count", [0, 257])
def test_the_number_of_ranks_is_bounded(key: str, count: int) -> None:
    with pytest.raises(ScenarioError, match=f"engine.{key}"):
        load("disagg", [f"engine.{key}={count}"])
