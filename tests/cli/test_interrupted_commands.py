"""Ctrl-C and SIGTERM during check, compare, sweep and worth: each ends at once with a marked result and never with a
failed check."""

from __future__ import annotations

import ctypes
import json
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

import pytest

from schedbench.cli.compare import _without_verdict
from schedbench.cli.console import WorkLog
from schedbench.cli.errors import interruptible
from schedbench.profiles.check import runs
from schedbench.profiles.check.runs import attempt
from schedbench.profiles.judge import local
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Result
from tests.conftest import RunCommand

pytestmark = [pytest.mark.wide, pytest.mark.processes]

SMALL = ("--set", "requests=2", "--set", "output_tokens=4", "--set", "values=none")
TWO = ("--over", "max_running_requests=1,2", "--alone")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def send_at(
    monkeypatch: pytest.MonkeyPatch, text: str, number: signal.Signals, *, time: int = 1
) -> list[str]:
    """Sends this process the signal when the command reports that work, for that time; returns everything that it
    reports."""
    said: list[str] = []

    def log(self: WorkLog, doing: str) -> None:  # noqa: ARG001
        said.append(doing)
        if text in doing and sum(text in one for one in said) == time:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(WorkLog, "__call__", log)
    return said


@pytest.mark.parametrize("number", list(CODES))
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("check", "mixed"), "watched run"),
        (("check", "mixed", "--seeds", "0"), "2 of 4 adversaries: "),
        (("compare", "mixed", "--a", "relay=pr25945", "--b", "relay=latest"), "3 of 10 runs"),
        (("sweep", "mixed", *TWO), "1 of 2 cells"),
    ],
    ids=["check", "check-adversaries", "compare", "sweep"],
)
def test_a_command_ends_with_the_code_of_the_signal(
    run_command: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    text: str,
    number: signal.Signals,
) -> None:
    said = send_at(monkeypatch, text, number)
    (tmp_path / "compare.json").write_text("of an earlier comparison")
    done = run_command(*arguments, *SMALL, "--output-dir", tmp_path)
    assert done.code == CODES[number]
    assert text in said[-1]
    assert "failed" not in done.out and "Traceback" not in done.err
    if arguments[0] == "sweep":
        content = json.loads((tmp_path / "sweep.json").read_text())
        assert content["run"]["cancelled"] and [cell["at"] for cell in content["cells"]] == [["1"]]
    elif "adversaries" in text:
        content = json.loads((tmp_path / "check.json").read_text())
        assert content["run"]["cancelled"] and not content["passed"]
        verdicts = {check["name"]: check["verdict"] for check in content["reports"][0]["checks"]}
        assert (verdicts["run"], verdicts["hazards"], verdicts["adversary"]) == (
            "passed",
            "passed",
            "not asked",
        )
        assert "; not asked: adversary." in " ".join(done.out.split())
    else:
        kept = f"runs kept in {tmp_path}: 2 whole, 0 interrupted"
        ends = {"check": "there is no result", "compare": f"there is no verdict; {kept}"}
        assert done.err == f"schedbench: interrupted: {ends[arguments[0]]}\n"
        assert not (tmp_path / f"{arguments[0]}.json").exists()


@pytest.mark.parametrize(
    ("options", "text", "says"),
    [
        (("--draws", "2"), "2 of 4 runs under draws", "interrupted after 2 of 4 runs under draws"),
        (
            ("--draws", "0", "--worth"),
            "counterfactual runs",
            "--quick or --draws 0 leaves it out; --draws 16 asks it",
        ),
    ],
    ids=["draws", "worth"],
)
def test_what_follows_the_verdict_of_compare_may_be_interrupted(
    run_command: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: tuple[str, ...],
    text: str,
    says: str,
) -> None:
    send_at(monkeypatch, text, signal.SIGINT)
    before = set(active_children())
    sides = ("--a", "relay=pr25945", "--b", "relay=latest", "--seeds", "1")
    done = run_command("compare", "mixed", *SMALL, *sides, *options, "--output-dir", tmp_path)
    assert done.code == 130, done.err
    document = json.loads((tmp_path / "compare.json").read_text())
    assert document["run"]["cancelled"]
    assert document["comparison"]["draws"] == {"count": 0, "abstained": says}
    assert f"hardware's constants, because {says}" in " ".join(done.out.split())
    assert document["comparison"]["verdict"] in done.out
    assert set(active_children()) <= before


@pytest.mark.parametrize(
    ("draws", "text", "time", "ended"),
    [("0", "1 of 2 runs", 1, 0), ("2", "2 of 4 runs under draws", 1, 1), ("0", "1 of 2 runs", 2, 1)],
    ids=["first case", "draws of the first case", "second case"],
)
def test_the_library_of_cases_shows_those_that_ended(
    run_command: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    draws: str,
    text: str,
    time: int,
    ended: int,
) -> None:
    names = ["cases/sync-count-null", "cases/tiny-h2d-prefill"]
    monkeypatch.setattr("schedbench.scenarios.shipped.case_names", lambda: names)
    send_at(monkeypatch, text, signal.SIGINT, time=time)
    options = ("--seeds", "1", "--draws", draws, "--set", "workload.output_tokens=4")
    done = run_command("compare", "cases", *options, "--output-dir", tmp_path)
    assert done.code == 130, done.err
    said = " ".join(done.out.split())
    assert f"of {ended} reported changes" in said and f"interrupted after {ended} of 2 cases." in said
    assert "None" not in said
    kept = json.loads((tmp_path / "cases.json").read_text())
    assert kept["run"]["cancelled"] and [*kept["cases"]] == names[:ended]
    assert run_command("report", tmp_path).out == done.out


@pytest.mark.parametrize(
    ("runs", "why"),
    [((operator.neg, "x"), "bad operand type"), ((os._exit, 3), "a worker process ended abruptly")],
    ids=["raised", "killed"],
)
def test_a_run_under_draws_that_fails_does_not_lose_the_verdict(
    run_command: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    runs: tuple[Callable[..., object], object],
    why: str,
) -> None:
    function, task = runs
    monkeypatch.setattr(local.LocalSide, "run_each", lambda *them: them[-1](function, [task] * len(them[-2])))
    before = set(active_children())
    sides = ("--a", "relay=pr25945", "--b", "relay=latest", "--seeds", "5", "--draws", "2")
    done = run_command("compare", "mixed", *SMALL, *sides, "--output-dir", tmp_path)
    assert done.code == 4, done.err
    found = json.loads((tmp_path / "compare.json").read_text())["comparison"]
    assert found["verdict"] == "better" and found["draws"]["count"] == 0
    lost = f"run 1 of 4 under draws, of relay=pr25945, failed: {why}"
    assert lost in " ".join(done.out.split()) and lost in done.err
    assert "Traceback" not in done.err
    assert set(active_children()) <= before


def cut_short() -> tuple[Resolved, Result]:
    """A question, and the result of a run that was interrupted."""
    question = ask("mixed", ["requests=1", "output_tokens=2", "values=none"])
    result = execute(question, Options(device="vgpu"))
    part = result.run.model_copy(update={"cancelled": True})
    return question, result.model_copy(update={"run": part})


def test_an_interrupted_run_under_draws_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process returns what it has, marked as cancelled."""
    question, result = cut_short()
    monkeypatch.setattr(local, "execute", lambda *_, **__: result)
    with pytest.raises(KeyboardInterrupt):
        list(local.run_each(map, question, result, [question.hardware]))


def test_worth_keeps_finished_runs_and_ends_its_processes(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    send_at(monkeypatch, "counterfactual runs: 2 of", signal.SIGTERM)
    before = set(active_children())
    done = run_command("worth", "mixed", *SMALL, "--output-dir", tmp_path)
    assert done.code == 143, done.err
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["run"]["further_cancelled"] and 1 <= len(document["worth"]["rows"]) <= 2
    assert not document["run"]["cancelled"], "compare takes it, since the run itself is whole"
    assert set(active_children()) <= before


def test_worth_of_a_run_whose_lines_were_not_watched_shows_the_run(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, outcome = cut_short()
    monkeypatch.setattr("schedbench.profiles.worth.worth.execute", lambda *_, **__: outcome)
    done = run_command("worth", "mixed", *SMALL)
    assert done.code == 130 and "further runs interrupted" in " ".join(done.out.split()), done.err


def test_an_interrupted_profile_has_the_code_of_an_interruption(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, outcome = cut_short()
    monkeypatch.setattr("schedbench.cli.profile._with_torch", lambda *_: outcome)
    assert run_command("profile", "mixed", "--tool", "torch", "--output-dir", tmp_path).code == 130


def test_an_incomplete_run_gets_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    question, result = cut_short()
    (tmp_path / "a").mkdir()
    result.write(tmp_path / "a/run-000.json")
    assert _without_verdict(tmp_path).endswith(f"{tmp_path}: 0 whole, 1 interrupted")
    monkeypatch.setattr(runs, "execute", lambda *_, **__: result)
    with pytest.raises(KeyboardInterrupt):
        attempt(question, Options(device="vgpu"))


@pytest.mark.parametrize("number", list(CODES))
def test_a_signal_that_a_callback_of_c_code_loses_arrives_again(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as end, interruptible():
        callback()
        time.sleep(60)
    assert end.value.code == CODES[number]
    assert not capfd.readouterr().err


@pytest.mark.parametrize("number", list(CODES))
def test_a_signal_after_the_end_of_a_command_changes_nothing(number: signal.Signals) -> None:
    program = (
        "import atexit, os\nfrom schedbench.cli.app import console\n"
        f"atexit.register(os.kill, os.getpid(), {number:d})\nconsole()"
    )
    command = [sys.executable, "-c", program, "explain", "ttft_ms"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupted_exec_leaves_the_exit_code_alone(tmp_path: Path) -> None:
    """``python -m`` exits by SIGINT where a KeyboardInterrupt has left the ``exec`` of a string, as in a dataclass."""
    (tmp_path / "module.py").write_text(
        "from schedbench.cli.errors import interruptible\n"
        "with interruptible():\n"
        "    exec('import os, signal; os.kill(os.getpid(), signal.SIGTERM)')\n"
    )
    done = subprocess.run([sys.executable, "-m", "module"], cwd=tmp_path, check=False)
    assert done.returncode == CODES[signal.SIGTERM]
