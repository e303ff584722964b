"""The cases that come with the package, and the section that makes a scenario a case."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedbench.profiles.platform.resolve import ask, resolve
from schedbench.scenarios.loader import load
from schedbench.scenarios.shipped import case_names, catalog, names
from tests.scenarios.refusals import refused


@pytest.mark.parametrize("name", case_names())
def test_a_case_is_valid_and_has_its_files_name(name: str) -> None:
    scenario = load(name)

    assert f"cases/{scenario.name}" == name
    assert scenario.about.endswith(".")
    assert scenario.case is not None
    assert resolve(scenario)


def test_cases_are_listed_apart_from_scenarios() -> None:
    assert [entry["name"] for entry in catalog(case_names())] == case_names()
    assert not {entry["name"] for entry in catalog(names())} & {Path(name).name for name in case_names()}


def test_the_case_section_is_not_part_of_the_digest() -> None:
    name = case_names()[0]
    scenario, other = load(name), load(name, ["case.expect=no change"])

    assert "case" not in scenario.expanded()
    assert scenario.case != other.case
    assert scenario.sha256 == other.sha256


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("case.expect=faster", "case.expect: "),
        ("case.metric=throughput", "case.metric: unknown metric, did you mean 'total_throughput'?"),
        ("case.price=3", "case.price: unknown key"),
    ],
)
def test_an_invalid_case_section_is_refused(override: str, message: str) -> None:
    [problem] = refused(ask, case_names()[0], [override])
    assert message in problem


def test_a_scenario_without_a_case_section_is_no_case() -> None:
    assert load("mixed").case is None
