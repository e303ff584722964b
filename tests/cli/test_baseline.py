"""Stored baselines: the command, and the pytest plugin that compares runs with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import schedbench as sb
from schedbench.cli.errors import UsageError
from schedbench.cli.pytest_plugin import ScheduleBench, schedbench_baseline
from schedbench.profiles.judge.gates import GateError
from schedbench.profiles.judge.verdict import MIN_SEEDS
from schedbench.profiles.judge.worker import SideError
from tests.conftest import RunCommand

SMALL = {"requests": 4, "output_tokens": 4, "values": "none", "save_tokens": True}
TESTS = """
import pytest

@pytest.mark.schedbench_baseline("mixed", gates=["decode.steady.schedule.sync:0"], seeds=2)
def test_it_is_there(schedbench, request):
    assert schedbench.load and not request.config.getoption("--schedbench-save")
    with pytest.raises(Exception, match="baseline mixed: unknown baseline.*; .* `pytest --schedbench-save` keeps one"):
        schedbench.run("mixed")

@pytest.mark.xfail(strict=True)
@pytest.mark.schedbench_baseline("mixed")
def test_a_marked_test_without_a_run_fails(schedbench): ...
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    sb.run("mixed", **SMALL).save(folder / "result.json")
    return folder


def test_a_result_is_saved_listed_shown_and_compared(
    run_command: RunCommand, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("baseline", "list").out == "no baseline in .schedbench/baselines\n"
    saved = run_command("baseline", "save", "main", results)
    assert (saved.code, saved.out) == (0, "baseline main: 1 result in .schedbench/baselines/main\n")
    listed = json.loads(run_command("baseline", "list", "--format", "json").out)
    assert [entry["name"] for entry in listed] == ["main"]
    assert listed[0]["about"].startswith("mixed · relay pr25945 · 1 run · 2")
    shown = run_command("baseline", "show", "main", "--format", "json").out
    assert shown == (results / "result.json").read_text()
    gates = ["--gate", "decode.steady.schedule.sync:0"]
    said = run_command("baseline", "compare", "main", results / "result.json", *gates)
    assert said.code == 0 and "every metric equal to the last digit" in " ".join(said.out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "mian", "x.json"), "baseline mian: unknown baseline, did you mean 'main'?"),
        (("save", "main", "RESULTS"), "baseline main: exists in"),
        (("save", "../main", "RESULTS"), "a name, not a path"),
        (("save", "..", "RESULTS", "--force"), "a name, not a path"),
        (("save", "", "RESULTS", "--force"), "a name, not a path"),
        (("save", "other", "none.json"), "none.json: No such file"),
    ],
)
def test_invalid_baselines_are_refused(
    run_command: RunCommand, results: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    folder = tmp_path / "kept"
    assert run_command("baseline", "save", "main", results, "--folder", folder).code == 0
    given = [str(results) if one == "RESULTS" else one for one in arguments]
    said = run_command("baseline", *given, "--folder", folder)
    assert said.code == 2 and message in said.err
    assert [one.name for one in folder.iterdir()] == ["main"]


def test_a_partial_result_is_neither_compared_nor_saved(
    run_command: RunCommand, results: Path, tmp_path: Path
) -> None:
    """A whole one is, of which only further runs were interrupted, as those of ``--ranges``."""
    whole, part = results / "result.json", tmp_path / "part.json"
    document = json.loads(whole.read_text())
    document["run"]["cancelled"] = True
    part.write_text(json.dumps(document))
    for command in (["compare", whole, part], ["baseline", "save", "main", part, "--folder", tmp_path]):
        said = run_command(*command)
        assert said.code == 2
        assert f"{part}: the result is partial, because its run was interrupted" in said.err
    with pytest.raises(SideError, match="B: the result is partial"):
        sb.compare(sb.load(whole), sb.load(part))
    document["run"] |= {"cancelled": False, "further_cancelled": True}
    part.write_text(json.dumps(document))
    said = run_command("compare", whole, part)
    assert said.code == 0, said.err


def test_the_marker_compares_runs_with_the_saved_baseline(tmp_path: Path) -> None:
    held = schedbench_baseline("mixed", gates=["decode.steady.schedule.sync:0"])
    bench = ScheduleBench(held, tmp_path, saved=set())
    bench.run("mixed", **SMALL)
    with pytest.raises(UsageError, match="baseline mixed: a second run would replace the first"):
        bench.run("mixed", **SMALL)
    names = [f"run-{number:03d}.json" for number in range(MIN_SEEDS)]
    assert sorted(path.name for path in (tmp_path / "mixed").iterdir()) == names
    bench = ScheduleBench(held, tmp_path, saved=None)
    with pytest.raises(AttributeError, match="module 'schedbench' has no attribute 'cmpare'"):
        bench.cmpare("mixed")
    bench.run("mixed", **SMALL).assert_budget("decode.steady", schedule={"sync": 0})
    with pytest.raises(
        pytest.fail.Exception, match=r"baseline mixed: B against .*5 seeds.*\ngate .*sync:0: failed"
    ):
        bench.run("mixed", overlap=False, **SMALL)
    bench = ScheduleBench(schedbench_baseline("mixed"), tmp_path, saved=None)
    with pytest.raises(pytest.fail.Exception, match=r"baseline mixed: B against .*5 seeds\): worse"):
        bench.run("mixed", cuda_graph=False, **SMALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "../../evil"}, "baseline '../../evil': a name, not a path"),
        ({"name": "mixed", "gates": ["thruput:1%"]}, "gate 'thruput:1%': .* did you mean 'throughput'?"),
        ({"name": "mixed", "gates": "throughput:1%"}, "gates: expected a list"),
        ({"name": "mixed", "seeds": 0}, "seeds: expected 1 or more, got 0"),
        ({"name": "mixed", "gate": []}, r"schedbench_baseline\(\) got an unexpected keyword argument 'gate'"),
        ({}, r"schedbench_baseline\(\) missing 1 required positional argument: 'name'"),
    ],
)
def test_what_the_commands_refuse_is_refused_in_the_marker(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, GateError, TypeError), match=message):
        schedbench_baseline(**arguments)


def test_pytest_has_the_fixture_the_marker_and_the_options(tmp_path: Path) -> None:
    (tmp_path / "test_schedule.py").write_text(TESTS)
    plugins = ("-p", "schedbench.cli.pytest_plugin", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, f"--rootdir={tmp_path}", "--strict-markers"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
