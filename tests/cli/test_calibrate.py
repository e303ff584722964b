"""``calibrate``: a scenario can name the profile that it writes, and missing measurements are reported."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from typer.testing import CliRunner

from schedbench.cli.app import app
from schedbench.cli.calibrate import page
from schedbench.profiles.calibrate import host
from schedbench.profiles.calibrate.calibration import conclusion
from tests.cli.pages import printed

pytestmark = pytest.mark.wide

SMALL = ("--host-only", "--batch-sizes", "1,2", "--prompt-tokens", "32", "--rounds", "1")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrated") / "here.yaml"
    done = CliRunner().invoke(app, ["calibrate", *SMALL, "--output", str(path), "--format", "json"])
    assert done.exit_code == 0, done.stderr
    return path, json.loads(done.stdout), done.stderr


def test_the_document_has_the_phases_of_the_written_profile(calibrated):
    path, document, _ = calibrated
    written = yaml.safe_load(path.read_text())
    assert written["phases"].keys() == document["phases"].keys()
    for name, phase in written["phases"].items():
        line = document["phases"][name]
        for which in ("a", "b"):
            assert phase[which]["value"] == pytest.approx(line[which], rel=1e-3)
            assert phase[which]["origin"].startswith(
                f"measured on {document['machine']}, {document['date']}, "
            )
    assert document["profile"]["name"] == "here"


def test_progress_and_usage_are_on_stderr(calibrated):
    path, _, stderr = calibrated
    assert f"--set device.hardware={path}" in stderr
    assert "overlap_on workload.requests=2" in stderr


def test_a_missing_folder_and_a_folder_are_noticed_before_the_measurement(tmp_path):
    done = CliRunner().invoke(app, ["calibrate", *SMALL, "--output", str(tmp_path / "no" / "here.yaml")])
    assert str(done.exception) == f"{tmp_path / 'no'}: no such folder" and not done.stderr
    done = CliRunner().invoke(app, ["calibrate", *SMALL, "--output", str(tmp_path)])
    assert str(done.exception) == f"--output {tmp_path}: not writable" and not done.stderr


def test_the_worst_line_may_be_too_high():
    phases = {"admit": {"worst": 1.2, "worst_n": 1}, "settle": {"worst": 0.1, "worst_n": 8}}
    said = conclusion({"machine": "here", "phases": phases, "device": []})
    assert said == "here: 2 host phases; the worst line is settle's, x 0.1 at n = 8."


def test_the_table_has_old_and_new_constants():
    line = {"a": 2500.0, "b": 31.5, "samples": 40, "sizes": 4, "residual": 120.0, "r2": 0.987, "worst_n": 8.0,
            "worst": 1.25, "old": {"a": 20000.0, "b": 500.0}}  # fmt: skip
    device = {"key": "host.launch", "value": 2300.0, "old": 4000.0, "basis": "median of 200"}
    document = {
        "base": "h200", "machine": "a machine", "date": "2026-01-02", "through_torch_ns": 2500.0,
        "outside_us_per_step": 1.5, "phases": {"admit": line, "new": line | {"old": None, "r2": None}},
        "device": [device], "missing": ["events: [no] events"], "conclusion": "",
    }  # fmt: skip
    rows = [line.split() for line in printed(page(document)).splitlines()]
    figures = ["2,500", "31.5", "120.0", "x", "1.25", "8"]
    assert ["admit", *figures, "20,000", "500.0"] in rows
    assert ["new", *figures, "–", "–"] in rows
    assert ["host.launch", "2,300", "4,000", "median", "of", "200"] in rows
    assert ["as", "in", "h200:", "events:", "[no]", "events"] in rows


def test_kinds_of_steps_have_their_own_lines(calibrated):
    _, document, _ = calibrated
    kinds = document["phases"]["settle"]["kinds"]
    assert kinds.keys() == {"decode", "mixed", "prefill"}
    written = document["profile"]["phases"]["settle"]["kinds"]["prefill"]
    assert written["a"]["value"] == pytest.approx(kinds["prefill"]["a"], rel=1e-3)
    assert f"{kinds['prefill']['samples']} samples" in written["a"]["origin"]
    assert document["phases"]["receive"]["kinds"] == {}
    assert f"{len(document['phases'])} host phases; the worst line is " in document["conclusion"]
    assert "  prefill" in printed(page(document), 160)


def test_without_cuda_the_skipped_probes_are_named(monkeypatch, run_command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = run_command("calibrate")
    assert said.code == 3 and "--host-only measures the scheduler's own phases" in said.err


def test_an_interrupted_calibration_writes_nothing(monkeypatch, tmp_path, run_command):
    """Ctrl-C comes in the middle of a run, which keeps its result; the calibration ends."""
    ran = []

    def interrupted(*_, **__):
        ran.append(1)
        return SimpleNamespace(run=SimpleNamespace(cancelled=True))

    monkeypatch.setattr(host, "execute", interrupted)
    path = tmp_path / "here.yaml"
    said = run_command("calibrate", *SMALL, "--output", path)
    assert said.code == 130 and "there is no result" in said.err
    assert len(ran) == 1
    assert not path.exists()
