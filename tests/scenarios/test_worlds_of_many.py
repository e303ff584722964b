"""How many ranks a scenario may have."""

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
def test_there_is_one_at_least_and_no_more_than_a_machine_bears(key: str, count: int) -> None:
    with pytest.raises(ScenarioError, match=f"engine.{key}"):
        load("disagg", [f"engine.{key}={count}"])
