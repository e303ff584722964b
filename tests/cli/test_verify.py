"""``verify``: its tables, its exit codes, and a whole verification with a virtual GPU in place of CUDA."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from schedbench.cli.app import app
from schedbench.cli.page import markdown
from schedbench.cli.verify import page
from schedbench.profiles.lab import verification
from schedbench.profiles.run.gpu_stages import GpuStage
from tests.cli.pages import printed

SMALL = ("--set", "workload.requests=2", "--set", "workload.output_tokens.max=4")


def row(why="", **more):
    fields = {
        "kind": "decode", "stream": "schedule", "range": "prepare", "file": "sched/x.py", "function": "f",
        "statement": "y[a|b]", "what": "h2d pinned", "predicted": {"count": 6, "bytes": 48},
        "announced": {"count": 6, "bytes": 48}, "recorded": {"count": 7, "bytes": 56}, "agrees": False, "why": why,
    }  # fmt: skip
    return fields | more


KERNELS = row("kernels of one op", file="", statement="", what="kernel per step", announced=None,
              predicted={"count": 20.0, "bytes": 0}, recorded={"count": 31.5, "bytes": 0})  # fmt: skip


def verified(**more):
    return {
        "agrees": False, "compared": 50, "steps": {"decode": [3, 3, 3]}, "trouble": [], "explained": [KERNELS],
        "unexplained": [row()], "rows": [], "conclusion": "DISAGREE",
    } | more  # fmt: skip


def test_the_conclusion_is_one_line():
    assert verification.conclusion(verified()) == (
        "DISAGREE: 50 counts compared; 1 differ without a known reason; 1 differ for a known reason."
    )
    good = verified(agrees=True, unexplained=[])
    assert verification.conclusion(good).startswith(
        "agree: 50 counts compared; none differs without a known reason"
    )
    assert "not the same steps: decode" in verification.conclusion(verified(steps={"decode": [3, 4, 3]}))
    assert "buffers ran full" in verification.conclusion(verified(trouble=["buffers ran full"]))


def test_the_tables_have_three_counts_and_reasons():
    text = printed(page(verified()), 150)
    assert "6 (48 B)   6 (48 B)" in " ".join(text.split("\n")).replace("    ", "   ")
    assert "7 (56 B)" in text
    assert "kernels of one op: the virtual GPU counts an op once" in text


def test_markdown_has_the_same_with_its_bars_escaped():
    text = markdown(page(verified()))
    assert text.startswith("**DISAGREE**")
    assert "y[a\\|b]" in text
    assert "|  | schedule · prepare · decode | kernel per step | 20 | – | 31.5 | kernels of one op |" in text


def test_verify_without_cuda_is_refused(monkeypatch, run_command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = run_command("verify", "mixed")
    assert said.code == 3 and "the prediction has nothing to be compared with" in said.err


@pytest.mark.parametrize(
    ("scenario", "word"), [("overlap_on", "device.values: none"), ("pp2", "several ranks")]
)
def test_scenarios_of_several_devices_are_refused(monkeypatch, run_command, scenario, word):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = run_command("verify", scenario)
    assert said.code == 3 and word in said.err


@pytest.fixture
def emulated(monkeypatch):
    """Replaces CUDA by a virtual GPU; only the profiler's records are synthetic."""
    monkeypatch.setattr(verification, "require_cuda", lambda _: None)
    monkeypatch.setattr(verification, "stages", partial(verification.stages, device="vgpu"))


@pytest.mark.wide
@pytest.mark.usefixtures("emulated")
def test_counts_of_three_processes_agree(tmp_path):
    done = CliRunner().invoke(
        app,
        ["verify", "mixed", *SMALL, "--relay", "latest", "--output-dir", str(tmp_path), "--format", "json"],
    )
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["agrees"] and document["compared"] > 20
    assert json.loads((tmp_path / "verify.json").read_text()) == document
    for name in ("predicted", "announced", "recorded"):
        assert (tmp_path / f"{name}.json").exists()
    predicted = json.loads((tmp_path / "predicted.json").read_text())
    assert predicted["scenario"]["expanded"]["workload"]["arrival"]["process"] == "burst"
    assert predicted["relay"]["state"] == "latest"


def test_a_failing_run_is_named(monkeypatch, run_command):
    monkeypatch.setattr(verification, "require_cuda", lambda _: None)
    monkeypatch.setattr(verification, "stages", lambda *_: [GpuStage("announced", ("-c", "1/0"), 10)])
    said = run_command("verify", "mixed")
    assert said.code == 4 and "the announced run failed: exit code 1: ZeroDivisionError" in said.err


def test_an_interrupted_verification_compares_nothing(monkeypatch, run_command):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "require_cuda", lambda _: None)
    monkeypatch.setattr(verification, "conduct", interrupted)
    said = run_command("verify", "mixed")
    assert said.code == 130 and "interrupted: there is no result" in said.err
