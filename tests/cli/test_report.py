"""schedbench report and compare on files: their output, and refused files."""

from __future__ import annotations

import csv
import io
import json
import os

import pytest
from typer.testing import CliRunner

from schedbench.cli.app import app
from schedbench.profiles.record.result import Result
from tests.profiles.captures.exports import Export, own_loop, sglang_loop
from tests.profiles.test_result import SAMPLE


@pytest.fixture
def capture(tmp_path):
    export = Export()
    sglang_loop(export, model=True)
    return export.write(tmp_path / "sglang.sqlite")


@pytest.fixture
def hostless(tmp_path):
    export = Export()
    own_loop(export)
    kinds = ("RUNTIME", "KERNEL", "SYNCHRONIZATION")
    return export.write(
        tmp_path / "cpu.sqlite", without=tuple(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in kinds)
    )


def run(*arguments, columns="120"):
    return CliRunner(env={"COLUMNS": columns}).invoke(app, list(map(str, arguments)))


def test_the_page_of_a_capture_names_its_kind_and_gaps(capture):
    done = run("report", capture)
    assert done.exit_code == 0
    for text in (
        "capture of Nsight Systems",
        "Nsight Systems (schema 3.7.2) · CUDA graphs: kernel by kernel · not for timing",
        "4 steps, ranges as in the map sglang",
        "! no event records",
        "h2d pageable blocking",
        "host ranges, ms",
    ):
        assert text in done.output
    for absent in ("relay", "TTFT", "throughput", "0 requests", "hunter2"):
        assert absent not in done.output


def test_unrecorded_figures_are_not_shown_as_zero(hostless):
    done = run("report", hostless)
    assert done.output.startswith("6 steps; no times: no GPU activity in the capture.\n")
    assert "no GPU activity" in done.output and "nothing of the device was recorded" in done.output
    assert "copies & syncs per step" not in done.output and "where the GPU waited" not in done.output


@pytest.mark.parametrize("columns", ["80", "160"])
@pytest.mark.parametrize("form", ["table", "md", "html", "csv", "json"])
def test_every_format_is_printed(capture, form, columns):
    done = run("report", capture, "--format", form, columns=columns)
    assert done.exit_code == 0 and "prepare" in done.output
    if form == "json":
        assert Result.from_json(done.output).labels.capture == "nsys"


def test_several_files_are_printed_in_order(capture):
    both = run("report", SAMPLE, capture)
    assert "host ranges" in both.output and "TTFT" in both.output
    rows = list(csv.DictReader(io.StringIO(run("report", SAMPLE, capture, "--format", "csv").output)))
    assert {row["scenario"] for row in rows} == {"mixed", "sglang"}
    assert len(json.loads(run("report", SAMPLE, capture, "--format", "json").output)) == 2


def test_a_stored_result_is_printed_like_its_run():
    assert run("report", SAMPLE, "--format", "json").output == SAMPLE.read_text()


def test_a_map_of_the_user_is_applied(capture, tmp_path):
    other = tmp_path / "mine.yaml"
    other.write_text(
        "name: mine\nabout: every receive is a step\nsteps: {launch: 'scheduler.recv_requests'}\n"
        "ranges: [{match: 'scheduler.run_batch', name: all of it, category: forward}]\n"
    )
    done = run("report", capture, "--map", other)
    assert "5 steps, ranges as in the map mine" in done.output and "all of it" in done.output


@pytest.mark.parametrize("edit", [{"conclusion": 5}, {"not_asked": None}, {"name": []}])
def test_an_edited_document_of_another_command_is_refused(tmp_path, run_command, edit):
    checks = [{"name": "run", "verdict": "passed", "about": "", "evidence": []}]
    relay = {"state": "latest", "switches": {}, "faults": []}
    report = {"engine": None, "wall_s": 1.0, "unproven": [], "relay": relay, "checks": checks}
    document = {"conclusion": "", "passed": True, "not_asked": {}, "reports": [report]}
    document |= {"run": {"command": ""}, "scenario": {"expanded": {"name": "mixed"}}}
    for change, code in (({}, 0), (edit, 2)):
        checks[0]["name"] = change.get("name", "run")
        (tmp_path / "check.json").write_text(json.dumps(document | change))
        assert run_command("report", str(tmp_path)).code == code


@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    [
        (["report", "nowhere.json"], 2, "No such file"),
        (["report", "junk.json"], 2, "expected a result.json, an .nsys-rep, its .sqlite, or a trace"),
        (["report", "list.json"], 2, "not a schedbench result"),
        (["report", "sglang.sqlite", "--map", "sglan"], 2, "did you mean 'sglang'"),
        (
            ["report", "edited.json"],
            2,
            "edited.json: its schema_version, 1.0, is not understood, or it is not",
        ),
        (["report", "list.json", "list.json", "--format", "svg"], 2, "--format svg is one picture"),
        (["report", "x.nsys-rep"], 3, "install Nsight Systems"),
        (["compare", "sglang.sqlite", "sglang.sqlite", "--a", "relay=latest"], 2, "compare takes a scenario"),
        (["compare", "sglang.sqlite", "cpu.sqlite"], 2, "not alike"),
    ],
)
@pytest.mark.usefixtures("capture", "hostless")
def test_other_files_are_refused(tmp_path, monkeypatch, run_command, arguments, expected, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv("SCHEDBENCH_NSYS", raising=False)
    monkeypatch.setattr("schedbench.profiles.captures.nsys.record.PLACES", ())
    (tmp_path / "junk.json").write_text("junk")
    (tmp_path / "list.json").write_text('[{"name": "mixed"}]')
    edited = json.loads(SAMPLE.read_text())
    edited["metrics"]["output_throughput"]["values"] = []
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    (tmp_path / "x.nsys-rep").write_bytes(b"report")
    said = run_command(*arguments)
    assert said.code == expected and message in said.err


def test_two_captures_are_compared(capture, tmp_path):
    export = Export()
    sglang_loop(export, model=True, blocking=False)
    done = run("compare", capture, export.write(tmp_path / "b.sqlite"))
    assert done.exit_code == 0
    for text in (
        "decode schedule sync 1 -> 0",
        "counts are exact",
        "one capture each does not show the noise",
    ):
        assert text in " ".join(done.output.split())
    assert "relay" not in done.output


def test_a_stored_budget_is_checked_again(tmp_path):
    """A budget that was broken in the run is broken in the report."""
    document = json.loads(SAMPLE.read_text())
    document["scenario"]["expanded"]["expect"] = {"decode": {"schedule": {"d2h": 0}}}
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert "budget broken" in run("report", tmp_path / "r.json").output
    document["scenario"]["expanded"]["expect"] = {"decode": "fast"}
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert "budget broken" not in run("report", tmp_path / "r.json").output


def test_gates_apply_to_captures(tmp_path):
    """Gates also apply to steps of unknown kind, and to a range."""
    export = Export()
    sglang_loop(export, slow=30)
    slower = export.write(tmp_path / "b.sqlite")
    export = Export()
    sglang_loop(export)
    gates = ["--gate", "step.schedule.sync:1", "--gate", "step_ms:+5%", "--gate", "range.prepare:+5%"]
    done = run("compare", export.write(tmp_path / "a.sqlite"), slower, *gates, "--format", "json")
    outcomes = {gate["gate"]: gate["outcome"] for gate in json.loads(done.output)["comparison"]["gates"]}
    assert outcomes == {
        "step.schedule.sync:1": "passed",
        "step_ms:+5%": "failed",
        "range.prepare:+5%": "passed",
    }
    assert done.exit_code == 1


def test_the_report_of_a_folder_is_that_of_its_result(tmp_path):
    (tmp_path / "result.json").write_bytes(SAMPLE.read_bytes())
    assert run("report", tmp_path).output == run("report", tmp_path / "result.json").output
    (tmp_path / "check.json").write_text("{}")
    assert run("report", tmp_path).stderr == f"schedbench: {tmp_path}: shown is result.json, not check.json\n"
