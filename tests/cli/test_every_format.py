"""Every command with a document prints it in every format, or says in one line why it does not; ``report`` and ``load``
read all of these documents again."""

from __future__ import annotations

import html
import inspect
import io
import json
import shlex
from pathlib import Path
from typing import get_args

import pytest
import typer

import schedbench as sb
from schedbench.cli.app import app
from schedbench.cli.arguments import Format
from tests.conftest import RunCommand

TINY = "--set requests=1 --set output_tokens=2 --set values=none"
TWO = "--set engine.relays=[pr25945,latest]"
COMMANDS = {
    "ladder": f"run mixed {TINY} --set engine.relays=[pr25945,latest]",
    "cases": f"compare cases --seeds 1 --draws 0 {TINY}",
    "check": f"check mixed --adversarial 0 {TINY}",
    "sweep": f"sweep mixed --over max_running_requests=1 {TINY}",
    "batches": f"onebatch mixed --batch 1 --prompt 8 --output 2 {TINY}",
}
CLASSES = {
    "run": sb.RunAnswer,
    "ladder": sb.LadderAnswer,
    "comparison": sb.ComparisonAnswer,
    "cases": sb.CasesAnswer,
    "check": sb.CheckAnswer,
    "sweep": sb.SweepAnswer,
    "batches": sb.BatchesAnswer,
}
LISTS = (
    "list relays",
    "list scenarios",
    "doctor",
    "explain",
    "explain tpot_ms",
    "explain overlap",
    "bench --only nothing",
    "baseline list",
)
UNDRAWN = {*get_args(Format)} - {"svg"}
REASONS = {"svg": "schedbench: --format svg: this page has no picture\n"}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The document of each command; of a run and of a comparison, the first that another one contains."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schedbench.scenarios.shipped.case_names", lambda: ["cases/overlap-wins"])
        for name, line in COMMANDS.items():
            patch.setattr("sys.stdout", out := io.StringIO())
            typer.main.get_command(app).main([*shlex.split(line), "--format", "json"], standalone_mode=False)
            found[name] = json.loads(out.getvalue())
    found["run"] = found["ladder"]["rungs"][0]["result"]
    (found["comparison"],) = found["cases"]["cases"].values()
    files = {name: tmp_path_factory.getbasetemp() / f"{name}.json" for name in found}
    for name, document in found.items():
        files[name].write_text(json.dumps(document))
    return files


@pytest.mark.wide
@pytest.mark.parametrize("name", CLASSES)
def test_a_stored_document_is_reported_in_every_format(
    name: str, kept: dict[str, Path], run_command: RunCommand
) -> None:
    document = json.loads(kept[name].read_text())
    for form in get_args(Format):
        done = run_command("report", kept[name], "--format", form)
        if done.code:
            assert (
                name in ("run", "check", "batches") and (form, done.err) in REASONS.items() and not done.out
            )
            continue
        text = " ".join(html.unescape(done.out).split())
        assert form in ("csv", "svg") or document["conclusion"] in text
        assert form != "json" or json.loads(done.out) == document
        assert form != "svg" or text.startswith("<svg")
        assert form != "csv" or len({row.count(",") > 1 for row in done.out.splitlines()}) == 1


@pytest.mark.parametrize("name", CLASSES)
def test_a_stored_document_is_loaded_as_its_answer(name: str, kept: dict[str, Path]) -> None:
    answer = sb.load(kept[name])
    assert type(answer) is CLASSES[name]
    assert answer.document == json.loads(kept[name].read_text())
    assert answer.passed and len(answer.frame("pandas")) and "&lt;table" in answer._repr_html_()


def test_a_document_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"schema_version": "9", "cells": [1]}')
    with pytest.raises(Exception, match=r"sweep\.json: its schema_version, 9, is not understood"):
        sb.load(tmp_path)


@pytest.mark.parametrize("line", LISTS)
def test_a_list_is_printed_in_every_format(
    line: str, run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for form in UNDRAWN:
        done = run_command(*line.split(), "--format", form)
        assert (done.code, done.err) == (0, ""), form


def test_every_command_offers_every_format() -> None:
    """``schema`` prints a JSON Schema or its page; ``trace`` and ``init`` write files; some have nothing to draw."""
    found = {}
    group = typer.main.get_command(app)
    for name, command in vars(group)["commands"].items():
        for part in vars(command).get("commands", {"": command}).values():
            form = inspect.signature(part.callback, eval_str=True).parameters.get("form")
            choices = set() if form is None else {*get_args(get_args(form.annotation)[0])}
            found[name if part is command else f"{name} {part.name}"] = choices
    partial = {name: forms for name, forms in found.items() if forms != {*get_args(Format)}}
    assert {name for name, forms in partial.items() if forms == UNDRAWN} == {
        *("check", "watch", "onebatch", "verify", "explain", "doctor", "bench", "calibrate"),
        *("list", "baseline list"),
    }
    others = {name: forms for name, forms in partial.items() if forms != UNDRAWN}
    assert others == {"schema": {"json", "md"}, "trace": set(), "init": set(), "baseline save": set()}
    assert len(found) > 18
