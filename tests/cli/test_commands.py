"""explain, list, doctor, and the exit codes of errors."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from schedbench.cli.app import app, main
from schedbench.cli.errors import EXIT_CODES, UsageError, exit_code, message
from schedbench.cli.list import What
from schedbench.cli.text import cut_right
from schedbench.profiles.record.definitions import DEFINITIONS
from schedbench.profiles.record.result import ResultError
from schedbench.sched.kernels.arrays import array_of
from tests.acceptance.runs import command_line, plain_environment


@pytest.fixture
def cli(monkeypatch) -> CliRunner:
    monkeypatch.delenv("COLUMNS", raising=False)
    return CliRunner()


@pytest.mark.wide
def test_reading_stored_results_and_wrong_arguments_import_no_torch(cli, tmp_path):
    made = cli.invoke(app, ["run", "mixed", "--set", "workload.requests=2", "--output-dir", str(tmp_path)])
    assert made.exit_code == 0
    kept = tmp_path / "result.json"
    commands = {
        f"report {kept}": "",
        f"trace {tmp_path}": "",
        **{f"list {what}": "" for what in get_args(What)},
        "--version": "schedbench",
        **{f"{verb} --help": "Usage" for verb in ("", *get_group(app).commands)},
        "explain tpot_ms": "ms",
        f"compare {kept} {tmp_path}": "",
        "run mixd": "did you mean 'mixed'",
        **{f"{verb} mixed --set overlpa=1": "'overlap'" for verb in ("run", "check", "worth", "compare")},
        "compare mixed --a relay=nope": "unknown relay state",
        "compare mixed --a overlpa=1": "did you mean 'overlap'",
        "compare mixed --a git": "is no side",
        "compare mixed": "needs --a and --b",
        "compare mixed --b overlap=maybe": "--b: engine.overlap: expected true",
        "compare mixed --b git:no/commit": "--b: git:no/commit: no such commit",
        "compare mixed --b overlap=true --gate foo:1%": "foo",
        "compare mixed --b hardware=h20": "--b: device.hardware: no hardware profile 'h20'",
        "compare mixed --b barrier=foo": "--b: engine.relay.barrier: expected off, top",
        "run mixed --relay nope.py:mine": "nope.py: no such file",
        "run mixed --set barrier=foo --set requests=3": "expected off, top, after-launch or",
        "run mixed --set preset=tinny": "model.preset: unknown preset",
        "run mixed --fault no-barier": "did you mean 'no-barrier'",
        "run mixed --engine sglang:/nowhere": "/nowhere is no folder",
        "run mixed --engine sglang:.,overlap=no": "is no folder; the keys of one engine are given by --set",
        "check mixed --relay latest --set requests=2 --relay pr25945": "--relay: given 2 times, and takes one value",
        "baseline list --folder a --folder=b": "--folder: given 2 times",
        "check mixed --relay latst": "--relay: engine.relay: unknown relay state, did you mean 'latest'",
        "sweep mixed --over overlap": "expected key=v1,v2",
        "sweep mixed --over hardware=h200,h20": (
            "--over device.hardware=h20: no cell could run: device.hardware: no hardware"
        ),
        "sweep mixed --over overlap=true,maybe": "--over engine.overlap=maybe",
        "sweep mixed --over relay=latest,nope": "--over engine.relay=nope",
        "sweep mixed --over overlap=true --metric speed": "no metric 'speed'",
    }
    program = r"""
import sys
from schedbench.cli.app import app
for command in map(str.split, sys.argv[1:]):
    try:
        app([*command, "--format", "json"] if command[0] == "compare" else command, standalone_mode=False)
    except Exception as error:
        print(error)
    light = "--help" in command or command[0] in ("--version", "report", "trace", "list", "explain")
    heavy = {"torch._C", "scipy", *(["numpy.version"] if light else [])}
    print("\x1e", heavy & set(sys.modules) or "")
"""
    done = subprocess.run([sys.executable, "-c", program, *commands], capture_output=True, text=True)
    answers = done.stdout.split("\x1e")
    for (command, wanted), answer, after in zip(commands.items(), answers, answers[1:], strict=False):
        assert wanted in answer and after.startswith(" \n"), (command, answer, after[:80])
    assert len(answers) == len(commands) + 1, done.stderr


def test_commands_that_run_list_the_codes_of_interruptions(run_command):
    verbs = (
        *("run", "compare", "check", "worth", "profile"),
        *("watch", "sweep", "onebatch", "verify", "calibrate"),
    )
    said = {verb: run_command(verb, "--help").out for verb in verbs}
    assert [verb for verb in verbs if not ("130" in said[verb] and "143" in said[verb])] == []


def test_every_definition_can_be_explained(cli):
    for name, definition in DEFINITIONS.items():
        shown = cli.invoke(app, ["explain", name])
        assert shown.exit_code == 0
        assert shown.output.startswith(f"{name}  [{definition.unit}, ")
        assert max(map(len, shown.output.splitlines())) <= 80, name


def test_explain_describes_a_metric(cli):
    assert cli.invoke(app, ["explain", "tpot_ms"]).output == (
        "tpot_ms  [ms, lower is better]\n"
        "\n"
        "Time per output token after the first. Requests with a single token have none.\n"
        "\n"
        "formula  (E2E - TTFT) / (output tokens - 1), rounded down to ns\n"
        "source   the clock of the run, at the events that the scheduler announces\n"
    )


def test_explain_alone_lists_all_names(cli):
    lines = cli.invoke(app, ["explain"]).output.splitlines()
    assert [line.split()[0] for line in lines] == list(DEFINITIONS)
    assert all(line.endswith(entry.about) for line, entry in zip(lines, DEFINITIONS.values(), strict=True))


@pytest.mark.parametrize("columns", [60, 200])
def test_explain_fits_the_terminal(cli, columns):
    for asked in (["explain"], ["explain", "forward_occupancy"]):
        lines = cli.invoke(app, asked, env={"COLUMNS": str(columns)}).output.splitlines()
        assert columns - 25 < max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    "command",
    [
        ["run", "start"],
        ["compare", "start", "--a", "relay=pr25945"],
        ["sweep", "start", "--over", "engine.overlap=true,false"],
        ["check", "start"],
        ["onebatch", "start"],
    ],
)
def test_a_file_in_place_of_the_output_folder_is_refused_before_any_run(run_command, tmp_path, command):
    (tmp_path / "taken").touch()
    said = run_command(*command, "--output-dir", str(tmp_path / "taken"))
    assert (said.code, said.err) == (2, f"schedbench: --output-dir {tmp_path / 'taken'}: File exists\n")


@pytest.mark.parametrize("what", ["scenarios", "models", "hardware", "maps", "engines"])
def test_lists_have_names_and_abouts(cli, what):
    entries = json.loads(cli.invoke(app, ["list", what, "--format", "json"]).output)
    assert entries and all(entry["name"] and entry["about"] for entry in entries)
    table = cli.invoke(app, ["list", what]).output.splitlines()
    assert [line.split()[0] for line in table] == [entry["name"] for entry in entries]


def test_an_unknown_command_is_a_usage_error_without_traceback(cli):
    shown = cli.invoke(app, ["list", "model"])
    assert shown.exit_code == 2
    assert "'model' is not one of 'scenarios', " in shown.output
    assert "did you mean 'models'?" in shown.output
    assert "Traceback" not in shown.output


def test_doctor_lists_what_can_run(cli):
    shown = cli.invoke(app, ["doctor", "--format", "json"])
    assert shown.exit_code == 0
    checks = {check["name"]: check for check in json.loads(shown.output)}
    assert checks["virtual GPU"]["ok"], checks["virtual GPU"]["detail"]
    assert {"python", "torch", "CUDA", "triton", "nvtx", "nsys"} <= checks.keys()


def test_doctor_exits_with_3_when_nothing_runs(cli, monkeypatch):
    run_checks = importlib.import_module("schedbench.profiles.lab.doctor")
    nothing = [
        run_checks.DoctorCheck("CUDA", False, "no device", runs=True),
        run_checks.DoctorCheck("python", True, "3"),
    ]
    monkeypatch.setattr(run_checks, "run_checks", lambda: nothing)
    shown = cli.invoke(app, ["doctor"])
    assert (shown.exit_code, shown.output) == (3, "–   CUDA    no device\nok  python  3\n")


def test_doctor_wraps_its_lines_but_for_the_command_of_pip(cli, monkeypatch):
    run_checks = importlib.import_module("schedbench.profiles.lab.doctor")
    lacking = [f"module{number}" for number in range(20)]
    command = f"/some where/python -m pip install {' '.join(lacking)}"
    detail = f"toy: /some where/python lacks {', '.join(lacking)}: {command}"
    checks = [
        run_checks.DoctorCheck("source", True, "toy", True),
        run_checks.DoctorCheck("import", False, detail),
    ]
    monkeypatch.setattr(run_checks, "run_checks", lambda: checks)
    for columns, env in ((160, {}), (60, {"COLUMNS": "60"})):
        first, *wrapped, last = cli.invoke(app, ["doctor"], env=env).output.splitlines()
        assert (first, last) == ("ok  source  toy", command)
        assert len(wrapped) > 1 and max(map(len, wrapped)) <= columns
        assert wrapped[0].startswith("–   import  toy: ") and wrapped[-1].endswith("module19:")
        assert {line[:12] for line in wrapped[1:]} == {" " * 12}


def test_every_error_with_an_exit_code_exists():
    for name in EXIT_CODES:
        module, _, kind = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), kind), Exception)


def test_exit_codes_of_errors(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "x").read_text()
    assert exit_code(missing.value) == 3
    assert message(missing.value) == f"{tmp_path / 'x'}: No such file or directory"
    with pytest.raises(IsADirectoryError) as directory:
        tmp_path.read_text()
    assert exit_code(directory.value) == 2
    assert (exit_code(UsageError()), exit_code(ZeroDivisionError())) == (2, None)
    assert message(UsageError("so")) == "so"
    assert exit_code(type("Narrower", (ResultError,), {})()) == 2


@pytest.mark.wide
@pytest.mark.parametrize(
    "arguments",
    [
        "list scenarios",
        "run overlap_on --set workload.requests=2",
        "explain ttft_ms",
    ],
)
def test_a_closed_pipe_is_no_failed_gate(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command_line(*arguments.split()),
        stdout=writer,
        stderr=subprocess.PIPE,
        env=plain_environment(None),
        timeout=60,
    )
    os.close(writer)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr


@pytest.mark.wide
@pytest.mark.parametrize(
    ("arguments", "closed"),
    [
        ("list scenarios", ">&-"),
        *(("run overlap_on --set workload.requests=2", one) for one in (">&-", "2>&-", ">&- 2>&- <&-")),
        ("run nosuch", "2>/dev/full || [ $? = 2 ]"),
    ],
)
def test_a_standard_stream_that_takes_nothing_leaves_the_exit_code_alone(arguments: str, closed: str) -> None:
    command = f'"$0" {arguments} {closed}'
    done = subprocess.run(
        ["sh", "-c", command, *command_line()], capture_output=True, text=True, env=plain_environment()
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_error_caused_by_an_interrupt_is_an_interruption(monkeypatch, capsys, number, code):
    """A module caught the interrupt during its import, and its next user found it incomplete."""

    def half_imported() -> None:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("schedbench.cli.app.app", half_imported)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    err = capsys.readouterr().err
    assert "interrupted, which caused" in err and "RecursionError" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("fails", "code", "said"),
    [
        (lambda: array_of(None), 4, "schedbench: the scheduler crashed at sched/kernels/arrays.py:"),
        (
            lambda: compile("x =", str(Path(__file__).parents[2] / "sched/loop/launch.py"), "exec"),
            4,
            "crashed at sched/loop/launch.py:1: Syn",
        ),
        (lambda: cut_right(None, 4), 70, "TypeError"),
    ],
    ids=["in the scheduler", "no Python", "in the tool"],
)
def test_a_crash_of_the_scheduler_is_no_defect_of_the_tool(monkeypatch, capsys, fails, code, said):
    monkeypatch.setattr("schedbench.cli.app.app", fails)
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code == code and said in err.splitlines()[-1] and err.startswith("Traceback")
