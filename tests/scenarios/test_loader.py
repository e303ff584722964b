"""Loading: shipped names, overrides, and the words in which a broken file is refused."""

from __future__ import annotations

import pytest
from schedbench.scenarios.loader import load
from schedbench.scenarios.problems import ScenarioError


def test_a_shipped_scenario_loads_by_name() -> None:
    assert load("mixed").workload.requests == 64


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ScenarioError, match="did you mean 'mixed'"):
        load("mixd")
