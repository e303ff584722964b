"""Scenarios with scripted faults, as commands: the result of a run, and the behaviour of other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunCommand

DEATH = "faults=[{rank: decode 0, dies: {phase: transfer, nth: 5}}]"
SMALL = (
    *("--set", "workload.requests=8", "--set", "workload.output_tokens={dist: uniform, min: 4, max: 16}"),
    *("--set", "engine.disaggregation={mode: pair, prefill: 2}"),
)
NEVER = "faults=[{link: [prefill 0, decode 0], tag: kv, does: drop, nth: 99}]"


def test_a_run_that_loses_a_rank_reports_it_and_keeps_its_result(
    run_command: RunCommand, tmp_path: Path
) -> None:
    said = run_command("run", "disagg", *SMALL, "--set", DEATH, "--output-dir", tmp_path)
    assert said.code == 4
    lines = said.err.splitlines()
    assert "broke off: partial" in " ".join(said.out.split())
    assert lines[-1] == "broke off: decode 0 was killed by script in transfer 5"
    assert "failed: decode 0 is gone: killed by script in transfer 5" in said.err
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["run"]["failure"] == "decode 0 was killed by script in transfer 5"
    assert document["outputs"]["abstained"].startswith("the run broke off: decode 0")
    assert [row["id"] for row in document["requests"]] == [f"r{index}" for index in range(8)]
    assert {row["status"] for row in document["requests"]} <= {"finished", "failed"}


@pytest.mark.wide
def test_worth_of_a_run_that_loses_a_rank_shows_the_run(run_command: RunCommand) -> None:
    said = run_command("worth", "disagg", *SMALL, "--set", DEATH)
    assert said.code == 4 and "broke off: partial" in " ".join(said.out.split()), said.err


@pytest.mark.wide
def test_a_request_failed_by_script_is_a_failed_workload(run_command: RunCommand) -> None:
    dropped = NEVER.replace("99", "2")
    said = run_command("run", "disagg", *SMALL, "--set", dropped)
    assert said.code == 4
    assert "1 failed: not all of its KV came from prefill 0: decode 0 waited 600 s" in said.err
    assert "tokens – 1 of 8 requests lost: not all of its KV came from prefill 0" in said.out


def test_requests_that_fail_by_their_grammar_are_in_the_digest(run_command: RunCommand) -> None:
    """The grammar is at its end, and ending is not allowed yet."""
    sampling = "workload.sampling={grammar: {choice: [a, b]}, min_new_tokens: 4, ignore_eos: false}"
    settings = ("--set", sampling, "--set", "workload.requests=2", "--format", "json")
    pair, alone = (
        run_command("run", "disagg", *settings, "--set", f"engine.disaggregation={mode}")
        for mode in ("{mode: pair}", "{mode: none}")
    )
    assert pair.code == alone.code == 4 and "2 failed: the grammar does not allow" in pair.err
    assert json.loads(pair.out)["outputs"] == json.loads(alone.out)["outputs"]
    assert len(json.loads(pair.out)["outputs"]["digest"]) == 64


def test_the_workload_of_a_failed_run_is_the_planned_one(run_command: RunCommand) -> None:
    """Rank 1 dies before the later clients' requests were sent."""
    death = "faults=[{rank: rank 1, dies: {phase: exchange, nth: 20}}]"
    few = ("--set", "workload.requests=8", "--set", "measure.warmup_requests=0")
    said = run_command("run", "dp_idle", *few, "--set", death)
    assert said.code == 4
    assert "prompt planned" in said.out and "output planned" in said.out and "achieved" not in said.out
    assert "the plan of all 8; 2 came" in said.out


@pytest.mark.wide
def test_a_message_that_never_came_is_reported(run_command: RunCommand) -> None:
    said = run_command("run", "disagg", *SMALL, "--set", NEVER)
    assert (said.code, said.err) == (0, "did not happen: prefill 0 to decode 0: drop of kv 99\n")
    never = "faults=[{rank: stage 1, dies: {phase: forward, nth: 9999}}]"
    said = run_command("run", "pp2", *SMALL[:2], "--world", "distributed", "--set", never, "--format", "json")
    assert json.loads(said.out)["conclusion"].startswith("did not happen: stage 1 dies in forward 9999; ")


def test_faults_do_not_affect_the_warm_up(run_command: RunCommand) -> None:
    settings = ("--set", "measure.warmup_requests=4", "--set", DEATH.replace("nth: 5", "nth: 1"))
    said = run_command("run", "disagg", *SMALL, *settings, "--format", "json")
    assert len(json.loads(said.out)["requests"]) == 8


@pytest.mark.wide
@pytest.mark.parametrize("script", [DEATH, NEVER.replace("99", "2")])
def test_check_runs_with_scripted_faults(run_command: RunCommand, script: str) -> None:
    said = run_command("check", "faults/parting", "--seeds", "0", "--relay", "latest", "--set", script)
    assert said.code == 0, said.out
    assert "adversary    not applicable" in said.out


@pytest.mark.wide
def test_check_does_not_pass_faults_that_did_not_happen(run_command: RunCommand) -> None:
    said = run_command("check", "faults/parting", "--seeds", "0", "--relay", "latest", "--set", NEVER)
    assert said.code == 1
    assert "run: did not happen: prefill 0 to decode 0: drop of kv 99" in " ".join(said.out.split())
