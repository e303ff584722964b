"""``schedbench check`` as a command: passed and failed checks, their evidence, and refused options."""

from __future__ import annotations

import csv
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from schedbench.cli import check_page
from schedbench.cli.page import markdown, screenful
from schedbench.profiles.check import all_faults, examine
from schedbench.profiles.check.conclusion import conclusion
from schedbench.profiles.check.faults import FaultScenario, fault_scenarios
from schedbench.profiles.check.report import Check
from schedbench.profiles.record.result import HazardAccess, HazardFinding, Hazards, SitePart
from tests.cli.pages import printed
from tests.conftest import RunCommand
from tests.profiles.cuda import vgpu_as_cuda

# One adversary, where the test is not about orders.
SMALL = ("faults/mixing", "--adversarial", "0")
FEW = ("workload.requests=2", "workload.output_tokens=4")
SETS = ("--set", FEW[0], "--set", FEW[1])
# For passing runs, whose size does not matter.
TINY = (*SMALL, *SETS)


def reports(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["reports"]
    return found


def test_all_checks_of_a_correct_scenario_pass(run_command: RunCommand) -> None:
    said = run_command("check", SMALL[0], "--seeds", "0", *SETS, "--relay", "latest")
    assert said.code == 0 and " ".join(said.out.split()).startswith("mixing passed with latest: run, ")
    assert " s; emulated h200; no time is judged" in said.out
    for name in ("run", "invariants", "contract", "tokens", "hazards", "budget", "adversary"):
        assert any(line.startswith(name) for line in said.out.splitlines())


@pytest.mark.wide
def test_a_document_has_every_check_and_unproven_places(run_command: RunCommand, tmp_path: Path) -> None:
    said = run_command("check", *TINY, "--relay", "latest", "--format", "json", "--output-dir", tmp_path)
    [report] = reports(said.out)
    assert (tmp_path / "check.json").read_text() == said.out
    assert report["relay"] == {"state": "latest", "switches": {}, "faults": []}
    assert {check["verdict"] for check in report["checks"]} == {"passed", "not applicable"}
    assert report["hazards_s"] > 0 and len(report["outputs"]["digest"]) == 64
    unproven = markdown(check_page.page(json.loads(said.out)))
    assert "<summary>Not reached</summary>" in unproven
    assert "<br>`context.streams.record(source, context.streams.forward)` |" in unproven


@pytest.mark.wide
def test_every_format_lists_skipped_checks_in_one_line(run_command: RunCommand, tmp_path: Path) -> None:
    asked = ("check", SMALL[0], "--seeds", "1", *SETS, "--relay", "latest", "--output-dir", tmp_path)
    said = run_command(*asked, "--format", "csv")
    content = json.loads((tmp_path / "check.json").read_text())
    assert content["not_asked"] == {
        "strategies": "the staging stream first, the backup stream first, the lengths stream first",
        "random orders": "all but seed 7",
        "modes": "all but overlapped loop, mixed chunk, radix cache, graphs",
        "relays": "all but latest",
        "known bugs": "all (--all-faults)",
        "scripted failures": "all",
    }
    line = "; ".join(f"{name}: {text}" for name, text in content["not_asked"].items())
    header, *rows = csv.reader(said.out.splitlines())
    assert header == ["relay", "check", "verdict", "about"] and rows[-1] == ["", "not asked", "", line]
    assert rows[0] == ["latest", "run", "passed", "2 requests ended"]
    page = check_page.page(content)
    assert f"not asked: {line}" in [str(block) for block in page.blocks]
    assert f"not asked: {line}" in markdown(page).splitlines()


@pytest.mark.wide
@pytest.mark.usefixtures("nothing_unproven")
def test_one_adversary_leaves_all_others_out(run_command: RunCommand) -> None:
    said = run_command("check", SMALL[0], *SETS, "--adversarial", "8", "--format", "json")
    left_out = json.loads(said.out)["not_asked"]
    assert left_out["strategies"].startswith("all work as late as possible, the schedule stream first, ")
    assert left_out["random orders"] == "all but seed 8"


@pytest.mark.wide
@pytest.mark.usefixtures("nothing_unproven")
def test_the_files_that_were_read_are_named_with_their_digests(
    run_command: RunCommand, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 9, "output_length": 3}\n' * 2)
    arguments = ("--set", f"workload={{trace: {trace}, format: jsonl, requests: 2}}", "--format", "json")
    checked = json.loads(run_command("check", "mixed", "--adversarial", "0", *arguments).out)
    relays = ("--set", "engine.relays=[pr25945, latest]", "--set", "expect={}")
    climbed = json.loads(run_command("run", "mixed", *arguments, *relays).out)
    ran = climbed["rungs"][0]["result"]
    assert checked["scenario"]["inputs"] == climbed["scenario"]["inputs"] == ran["scenario"]["inputs"]
    [part] = ran["scenario"]["inputs"]
    assert part["key"] == "workload.trace" and part["sha256"] == sha256(trace.read_bytes()).hexdigest()


@pytest.mark.usefixtures("nothing_unproven")
def test_a_hazard_is_reported_with_both_lines(run_command: RunCommand) -> None:
    said = run_command("check", *SMALL, "--relay", "pr25945", "--fault", "no-barrier")
    assert said.code == 1 and said.out.startswith("mixing FAILED: hazards with pr25945 · fault no-barrier; ")
    assert "must come before the schedule stream's write" in " ".join(said.out.split())
    assert "sched/model/decoder.py:" in said.out and "sched/kernels/allocation.py:" in said.out


@pytest.mark.usefixtures("nothing_unproven")
def test_an_adversary_is_reported_with_the_first_wrong_token(run_command: RunCommand) -> None:
    said = run_command("check", "faults/mixing", "--adversarial", "0", "--fault", "staging-refilled")
    text = " ".join(said.out.split())
    assert said.code == 1
    assert "adversary 0 (all work as late as possible): request r" in text and "instead of" in text


@pytest.mark.usefixtures("nothing_unproven")
def test_a_broken_budget_fails_with_its_lines(run_command: RunCommand) -> None:
    said = run_command("check", *TINY, "--expect", "prefill.schedule.h2d=0")
    text = " ".join(said.out.split())
    assert said.code == 1
    assert (
        "budget: prefill.schedule.h2d:" in text and "0 allowed" in text and "sched/loop/placement.py:" in text
    )


@pytest.mark.usefixtures("nothing_unproven")
def test_an_untested_budget_does_not_pass_beside_a_kept_one(run_command: RunCommand) -> None:
    both = ("--expect", "idle.schedule.h2d=0", "--expect", "decode.schedule.d2h=9")
    said = run_command("check", *TINY, *both, "--format", "json")
    [budget] = [check for check in reports(said.out)[0]["checks"] if check["name"] == "budget"]
    [evidence] = budget["evidence"]
    assert said.code == 1 and budget["verdict"] == "failed" and "its budget is untested" in evidence["says"]


@pytest.mark.usefixtures("nothing_unproven")
def test_a_failing_run_is_a_failed_check(run_command: RunCommand) -> None:
    said = run_command("check", *TINY, "--fault", "never-resolve", "--format", "md")
    assert said.code == 1 and "| run | failed |" in said.out and "has no input ids" in said.out
    assert "| tokens | not applicable |" in said.out


@pytest.mark.wide
@pytest.mark.usefixtures("nothing_unproven")
def test_the_token_check_does_not_apply_to_lagging_penalties(run_command: RunCommand) -> None:
    penalised = ("--set", "workload.sampling.presence_penalty=0.5")
    said = run_command("check", *TINY, "--relay", "pr25945", *penalised, "--format", "json")
    [tokens] = [check for check in reports(said.out)[0]["checks"] if check["name"] == "tokens"]
    assert said.code == 0 and tokens["verdict"] == "not applicable" and "penalties" in tokens["about"]


@pytest.mark.wide
@pytest.mark.usefixtures("nothing_unproven")
def test_every_relay_of_a_ladder_is_checked(run_command: RunCommand) -> None:
    relays = "engine.relays=[{state: pr26425}, {state: latest}]"
    said = run_command("check", *TINY, "--set", relays, "--format", "json")
    assert [report["relay"]["state"] for report in reports(said.out)] == ["pr26425", "latest"]


def test_a_run_under_an_adversary_shows_no_times(run_command: RunCommand) -> None:
    said = run_command("run", "faults/mixing", "--adversarial", "1")
    assert said.code == 0 and "times mean nothing" in " ".join(said.out.split())
    assert "TTFT" not in said.out and "copies & syncs per step" in said.out


@pytest.mark.wide
def test_all_faults_are_checked_off_and_on(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = fault_scenarios()["never-resolve"]
    one = {"never-resolve": fault._replace(overrides=(*fault.overrides, *FEW))}
    monkeypatch.setattr(all_faults, "fault_scenarios", lambda: one)
    said = run_command("check", "--all-faults", "--seeds", "0", "--format", "json")
    document = json.loads(said.out)
    [fault] = document["faults"]
    assert said.code == 0 and document["passed"] and fault["clean"]
    assert fault["caught_by"] == ["contract"]  # which needs no run
    assert [check["name"] for check in fault["broken"]] == ["contract"]
    assert {"run", "tokens", "hazards", "adversary"} <= {check["name"] for check in fault["sound"]}
    assert said.err == "1 of 1: never-resolve caught by contract\n"
    assert [waiting["name"] for waiting in document["awaited"]] == ["idle-rows-stashed"]
    page = markdown(check_page.page(document))
    assert "| never-resolve | pr25945 | passed | contract |" in page


@pytest.mark.wide
def test_a_fault_that_no_check_finds_fails(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is harmless here: it stashes before sampling, and no sample is delayed."""
    fault = fault_scenarios()["stash-before-sampling"]
    harmless = FaultScenario(fault.fault, fault.scenario, (*fault.overrides[:2], *FEW))
    monkeypatch.setattr(all_faults, "fault_scenarios", lambda: {harmless.fault: harmless})
    said = run_command("check", "--all-faults", "--seeds", "0")
    assert said.err == "1 of 1: stash-before-sampling caught by NOTHING\n"
    assert said.code == 1 and "NOTHING" in said.out
    assert said.out.startswith("1 of 1 known bugs are NOT caught: stash-before-sampling")


# ---- on CUDA -----------------------------------------------------------------------------------------------


def test_without_a_gpu_the_alternative_is_named(run_command: RunCommand) -> None:
    said = run_command("check", "faults/mixing", "--device", "cuda")
    assert said.code == 3 and "no CUDA device here" in said.err and "check --device vgpu" in said.err


def test_several_ranks_are_not_checked_on_one_device(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    vgpu_as_cuda.install(monkeypatch)
    said = run_command("check", "faults/staging", "--device", "cuda")
    assert said.code == 3 and "several ranks" in said.err


@pytest.mark.wide
@pytest.mark.parametrize(("fault", "code"), [((), 0), (("--fault", "no-barrier"), 1)])
def test_checks_on_cuda(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, fault: tuple[str, ...], code: int
) -> None:
    """Uses a virtual GPU in place of CUDA."""
    vgpu_as_cuda.install(monkeypatch)
    said = run_command(
        "check", "faults/mixing", "--relay", "pr25945", "--device", "cuda", "--format", "json", *fault
    )
    [report] = reports(said.out)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert said.code == code
    assert verdicts == {
        "run": "passed",
        "invariants": "passed",
        "hazards": "failed" if fault else "passed",
        **dict.fromkeys(("contract", "tokens", "budget", "adversary"), "not applicable"),
    }


# ---- the first screenful -----------------------------------------------------------------------------------


def checked(name: str, *findings: str) -> dict[str, Any]:
    """Returns a check with these findings."""
    evidence = [{"says": finding, "sites": [], "field": ""} for finding in findings]
    return {"name": name, "verdict": "failed" if findings else "passed", "about": "", "evidence": evidence}


def many_relays(states: int, findings: int) -> dict[str, Any]:
    """Returns a document of so many relays, the last of which fails with so many findings."""
    passed = [[checked("run")]] * (states - bool(findings))
    failed = [[checked("hazards", *(f"finding {n}" for n in range(findings)))]] * bool(findings)
    reports = [
        {
            "engine": None,
            "relay": {"state": f"s{n}", "switches": {}, "faults": []},
            "wall_s": 1.0,
            "checks": checks,
            "unproven": [],
        }
        for n, checks in enumerate([*passed, *failed])
    ]
    expanded = {"expanded": {"name": "many"}}
    content = {"scenario": expanded, "reports": reports, "not_asked": {}, "passed": False}
    return {**content, "run": {"command": "schedbench check"}, "conclusion": conclusion(content)}


def test_a_screenful_has_the_relays_that_failed_and_some_of_their_findings() -> None:
    content = many_relays(12, 9)
    shown = markdown(screenful(check_page.page(content, few=True)))
    assert shown.startswith("**many FAILED: hazards with s11; finding 0, and 8 more.**")
    assert (
        "**many · s11**" in shown
        and "**many · s0**" not in shown
        and "--all also shows: many · s0, " in shown
    )
    assert "finding 3" in shown and "finding 4" not in shown and "hazards: and 5 more with --all" in shown
    assert markdown(check_page.page(content)).count("finding") == 10
    assert "_1.0 s; no time is judged_" in shown  # nothing says on which device


def test_the_sentence_has_the_first_finding_of_each_failed_check() -> None:
    content = many_relays(1, 3)
    content["reports"][0]["checks"].insert(0, checked("run", "a crash."))
    said = "many FAILED: run, hazards with s0; run: a crash; hazards: finding 0, and 2 more."
    assert conclusion(content) == said


def test_the_sentence_has_the_finding_about_a_relay_of_ones_own() -> None:
    content = many_relays(1, 3)
    findings = content["reports"][0]["checks"][0]["evidence"]
    findings[0]["sites"] = [{"file": "sched/relay/lengths.py"}]
    findings[1]["sites"] = [{"file": "sched/loop/launch.py"}, {"file": "my_relay.py"}]
    assert conclusion(content) == "many FAILED: hazards with s0; finding 1, and 2 more."


def of_hazards(*findings: HazardFinding) -> dict[str, Any]:
    """Returns a document of one relay with these hazards."""
    content = many_relays(1, 1)
    asked = examine.hazards(Hazards(findings=findings))
    content["reports"][0]["checks"] = TypeAdapter(list[Check]).dump_python([asked], mode="json")
    return content


def hazard(resource: str, first: str, second: str | None, line: int) -> HazardFinding:
    """Returns a read of ``second`` at that line after a write of ``first`` at line 1, or no read."""
    sites = [SitePart(file="sched/a.py", function="f", line=n, statement=f"s{n}") for n in (1, line)]
    accesses = [
        HazardAccess(op="add", stream=stream, site=sites[n], callers=tuple(sites[:n]))
        for n, stream in enumerate((first, second))
        if stream is not None
    ]
    return HazardFinding(
        resource=resource,
        first=accesses[0],
        second=accesses[1] if second else None,
        missing=f"missing {line}",
    )


def test_hazards_between_the_same_streams_are_shown_as_one() -> None:
    found = [hazard("table", "schedule", "forward", n) for n in (2, 3, 3, 4, 5, 6, 7)]
    found.insert(1, hazard("result of add at sched/a.py:1", "schedule", "forward", 8))
    others = [
        hazard("table", "forward", "schedule", 9),
        hazard("freed block of table", "schedule", "forward", 10),
        hazard("table", "copy", "host", 11),
        hazard("table", "copy", None, 12),
        hazard("buffer", "copy", None, 13),
    ]
    content = of_hazards(*found, *others)
    lines = [str(line).strip() for line in check_page.evidence(content, None)]
    assert [line for line in lines if line.startswith("hazards")] == [
        "hazards: table: missing 2",
        "hazards: table: missing 9",
        "hazards: freed block of table: missing 10",
        "hazards: table: missing 11",
        "hazards: table: missing 12",
        "hazards: buffer: missing 13",
    ]
    begin = lines.index("and 7 more where the forward stream does not wait for the schedule stream:")
    assert lines[begin - 3 : begin] == ["sched/a.py:1  s1", "sched/a.py:2  s2", "called at sched/a.py:1  s1"]
    assert lines[begin + 1 : begin + 8] == [
        "result of add at sched/a.py:1: sched/a.py:8",
        *(f"table: sched/a.py:1 and sched/a.py:{line}" for line in (3, 4, 5, 6, 7)),
        "",
    ]
    few = [str(line).strip() for line in check_page.evidence(content, 4)]
    assert "and 2 more with --all" in few and few[-1] == "hazards: and 2 more with --all"
    groups = [item["group"] for item in content["reports"][0]["checks"][0]["evidence"]]
    assert groups[8:] == [
        "where the schedule stream does not wait for the forward stream",
        "where the forward stream re-uses a block that the schedule stream still uses",
        "where the host does not wait for the copy stream",
        "",
        "",
    ]


def test_folded_evidence_keeps_its_indent_and_all_of_its_text() -> None:
    found = [hazard("table", "schedule", "forward", 3)]
    content = of_hazards(
        *found, hazard("result of a copy that a long sentence is about", "schedule", "forward", 8)
    )
    item = content["reports"][0]["checks"][0]["evidence"][0]
    item["sites"][0] |= {"file": "a" * 90 + ".py", "statement": "statement of many words " * 5}
    rows = printed(check_page.page(content), 60).splitlines()
    begin = rows.index("hazards: table: missing 3")
    end = rows.index("", begin)
    assert "aaa.py:1statementofmanywords" in "".join("".join(rows[begin:end]).split())
    assert {len(row) - len(row.lstrip()) for row in rows[begin + 1 : end]} == {4, 8}


def test_the_conclusion_of_relays_that_pass_names_them() -> None:
    assert conclusion(many_relays(6, 0)) == (
        "many passed with s0, s1, s2, s3 and 2 more: all checks that apply."
    )
