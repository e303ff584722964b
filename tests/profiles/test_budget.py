"""Budgets compared with a stored result: what exceeds them, and which lines are responsible."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

from schedbench.profiles.measure.budget import breaches, untested, untested_text
from schedbench.profiles.record.result import RankPart, Result, read


@pytest.fixture
def result() -> Result:
    return read(Path(__file__).parent / "sample_result.json")


def offenders(breach) -> list[tuple[str, int]]:
    return [
        (offender.site.function if offender.site else "", offender.times) for offender in breach.offenders
    ]


def test_a_budget_that_is_kept(result):
    budget = {
        "decode": {"schedule": {"h2d": 4, "d2h": 1, "sync": 0}},
        "decode.steady": {"schedule": {"h2d": 0, "d2h": 0, "sync": 0}, "forward": {"sync": 0}},
    }
    assert breaches(budget, result) == []


def test_a_budget_limits_the_worst_step(result):
    (breach,) = breaches({"decode": {"schedule": {"h2d": 3, "d2h": 1}}}, result)
    assert (breach.kind, breach.stream, breach.counter) == ("decode", "schedule", "h2d")
    assert (breach.allowed, breach.seen, breach.steps_with) == (3, 4, 60)


def test_offending_lines_match_kind_stream_direction_and_quality(result):
    (breach,) = breaches({"decode": {"schedule": {"d2h": 0}}}, result)
    assert offenders(breach) == [("pull_lengths", 350)]
    (breach,) = breaches({"decode": {"copy": {"d2h": 0}}}, result)
    assert offenders(breach) == [("copy_result", 700)]
    (breach,) = breaches({"decode": {"schedule": {"d2h_blocking": 0}}}, result)
    assert offenders(breach) == [("pull_lengths", 350)]
    (breach,) = breaches({"mixed": {"copy": {"sync": 0}}}, result)
    assert offenders(breach) == [("", 40)]


def test_offending_lines_of_steady_steps_ran_in_them(result):
    (breach,) = breaches({"decode.steady": {"copy": {"d2h": 0}}}, result)
    assert (breach.seen, offenders(breach)) == (1, [("copy_result", 350)])


def test_kernels_have_no_offending_lines(result):
    (breach,) = breaches({"decode": {"forward": {"kernel": 10}}}, result)
    assert (breach.seen, breach.offenders) == (302, ())


def test_breaches_come_in_the_order_of_the_budget(result):
    budget = {"mixed": {"schedule": {"h2d": 0, "d2h": 0}}, "decode": {"copy": {"sync": 0}}}
    found = [(breach.kind, breach.counter) for breach in breaches(budget, result)]
    assert found == [("mixed", "h2d"), ("mixed", "d2h"), ("decode", "sync")]


def test_a_budget_for_a_kind_without_steps_is_untested(result):
    budget = {"verify": {"schedule": {"h2d": 0}}, "decode": {}}
    assert breaches(budget, result) == []
    assert untested(budget, result) == ["verify"]
    kinds = ", ".join(result.per_step)
    assert (
        untested_text("verify", result)
        == f"no step was of kind verify, only of {kinds}; its budget is untested"
    )
    empty = result.model_copy(update={"per_step": {}})
    assert untested_text("verify", empty) == "no step was of kind verify; its budget is untested"


@pytest.mark.parametrize("role", ["decode", "pipeline"])
def test_each_of_several_ranks_has_the_budget(result, role):
    first, other = result.per_step, deepcopy(result.per_step)
    other["decode"].streams["schedule"]["h2d"] = (
        other["decode"].streams["schedule"]["h2d"].model_copy(update={"max": 9})
    )
    abstained = {"value": None, "abstained": "not measured"}
    ranks = tuple(
        RankPart(name=f"{role} {index}", role=role, per_step=per_step, idle=abstained, metrics={})
        for index, per_step in enumerate((first, other))
    )
    (breach,) = breaches({"decode": {"schedule": {"h2d": 4}}}, result.model_copy(update={"ranks": ranks}))
    assert (breach.seen, breach.steps_with) == (9, 120)
