"""Budgets with a condition: checked where the run has the settings, and reported as not checked elsewhere."""

from __future__ import annotations

import json

import pytest

from schedbench.scenarios.loader import load
from schedbench.scenarios.problems import ScenarioError
from tests.conftest import RunCommand

pytestmark = pytest.mark.wide

SETTINGS = (
    "workload.requests=3",
    "workload.prompt_tokens.max=40",
    "workload.output_tokens={dist: uniform, min: 4, max: 8}",
    "measure={warmup_requests: 0, repeat: 1, seed: 0}",
    "engine.overlap=false",
)
SERIAL = ("run", "mixed", *(word for setting in SETTINGS for word in ("--set", setting)))
REASON = "asked where overlap is true, and here it is false"


@pytest.mark.parametrize("form", ["table", "md", "html"])
def test_a_budget_of_other_settings_is_reported_as_not_checked(run_command: RunCommand, form: str) -> None:
    found = run_command(*SERIAL, "--format", form)
    assert found.code == 0
    assert f"budget of decode.steady not asked: {REASON}" in " ".join(found.out.split())


def test_documents_and_rows_have_the_reason(run_command: RunCommand) -> None:
    found = run_command(*SERIAL, "--format", "json")
    assert (found.code, json.loads(found.out)["not_asked"]) == (0, {"decode.steady": REASON})
    rows = run_command(*SERIAL, "--format", "csv").out.splitlines()
    [row] = [row for row in rows if "expect.decode.steady" in row]
    assert f"not asked: {REASON}" in row


@pytest.mark.parametrize("overlap", ["true", "auto"])
def test_a_budget_whose_condition_holds_is_checked(run_command: RunCommand, overlap: str) -> None:
    budget = "expect.decode.steady.forward={d2h: 0}"
    found = run_command(*SERIAL[:-1], f"engine.overlap={overlap}", "--set", budget, "--format", "json")
    assert found.code == 1 and "not_asked" not in json.loads(found.out)


def test_check_lists_budgets_not_checked(run_command: RunCommand) -> None:
    small = ("--set", "workload.requests=2", "--set", "workload.output_tokens=4", "--adversarial", "0")
    found = run_command("check", "mixed", *small, "--set", "engine.overlap=false", "--format", "json")
    [budget] = [check for check in json.loads(found.out)["reports"][0]["checks"] if check["name"] == "budget"]
    assert budget["verdict"] == "not applicable" and budget["about"] == f"decode.steady not asked: {REASON}"


@pytest.mark.parametrize("relay", ["latest", "pr25945"])
def test_the_budget_of_speculation_is_that_of_latest(run_command: RunCommand, relay: str) -> None:
    small = ("--set", "workload.requests=2", "--set", "workload.output_tokens=8", "--relay", relay)
    found = run_command("run", "spec_v2", *small, "--format", "json")
    reason = f"asked where relay is latest, and here it is {relay}"
    kinds = () if relay == "latest" else ("draft", "verify", "draft_extend")
    assert (found.code, json.loads(found.out).get("not_asked", {})) == (0, dict.fromkeys(kinds, reason))


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("overlpa: true", "when.overlpa: unknown key, did you mean 'overlap'?"),
        ("overlap: maybe", "when.overlap: expected true, false or auto, got 'maybe'"),
        (
            "mode: v1",
            "when.mode: ambiguous key, expected engine.speculative.mode or engine.disaggregation.mode",
        ),
        ("engine: 3", "when.engine: expected a key with a single value"),
    ],
)
def test_impossible_conditions_are_refused(when: str, message: str) -> None:
    with pytest.raises(ScenarioError, match="when") as error:
        load("mixed", [f"expect.decode.steady.when={{{when}}}"])
    assert message in str(error.value)


def test_a_budget_that_no_step_was_asked_for_fails(run_command: RunCommand) -> None:
    found = run_command(*SERIAL, "--expect", "verify.schedule.sync=0")
    assert found.code == 1
    assert "no step was of kind verify, only of decode, " in found.err
