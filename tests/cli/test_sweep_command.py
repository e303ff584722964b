"""``schedbench sweep`` end to end, and its pages."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schedbench.cli import sweep_page
from schedbench.cli.app import app
from schedbench.profiles.judge.trials import WorkloadError
from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.ranks.execute import execute
from schedbench.profiles.sweeps import runs
from schedbench.profiles.sweeps.conclusion import sweep_conclusion
from tests.cli.pages import printed

SMALL = (
    *("--set", "requests=2", "--set", "prompt_tokens=32", "--set", "output_tokens=32"),
    *("--set", "warmup_requests=0", "--device", "vgpu"),
)
AXES = ("--over", "concurrency=1,2", "--over", "model.preset=tiny-llama,llama-3-8b")


def swept(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["sweep", "overlap_on", *SMALL, *arguments])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    done = swept(*AXES, "--output-dir", str(folder))
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def document(kept: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((kept / "sweep.json").read_text())
    return content


def synthetic(rows: dict[str, tuple[float, ...]], **sweep: Any) -> dict[str, Any]:
    """Returns a document with those differences over a first axis of 1, 2, 4, ..."""
    values = [str(2**k) for k in range(len(next(iter(rows.values()))))]
    cells = [
        {
            "at": [value, name],
            "values": [100.0, 100 + delta],
            "delta_pct": delta,
            "candidate": "better" if delta > 0 else "worse",
            "tokens": "equal",
            "refused": None,
            "results": [],
        }
        for name, row in rows.items()
        for value, delta in zip(values, row, strict=True)
    ]
    return {
        "run": {"command": "schedbench sweep", "cancelled": False},
        "labels": {"emulated": True, "host": "modelled", "acceptance": "measured and simulated"},
        "hardware": ["h100", "h200"],
        "scenario": {"name": "made up"},
        "sweep": {
            "metric": "output_throughput",
            "unit": "tokens/s",
            "direction": "higher",
            "exact": True,
            "axes": [{"key": "load", "values": values}, {"key": "model", "values": list(rows)}],
            "sides": [{"label": "off"}, {"label": "on"}],
            **sweep,
        },
        "cells": cells,
        "break_even": [],
        "conclusion": "",
    }


def page(document: dict[str, Any]) -> list[str]:
    return printed(sweep_page.page(document), 300).splitlines()


def test_two_axes_form_a_table(document: dict[str, Any]) -> None:
    lines = page(document)
    assert lines[0] == document["conclusion"]
    assert (
        lines[1] == "emulated h200 · host time modelled · 1 workload seed per cell · Δ % · higher is better"
    )
    assert lines[3].split() == ["model.preset", "/", "workload.arrival.concurrency", "1", "2", "break-even"]
    assert [line.split()[0] for line in lines[5:7]] == ["tiny-llama", "llama-3-8b"]
    assert lines[7:] == ["one run per side: `schedbench compare` gives the verdict over workload seeds"]
    assert [line.split()[-2:] for line in lines[5:7]] == [["always", "worse"], ["always", "better"]]


def test_formats_agree(document: dict[str, Any], kept: Path) -> None:
    def again(form: str) -> str:
        done = swept(*AXES, "--output-dir", str(kept), "--resume", "--format", form)
        assert done.exit_code == 0
        return str(done.stdout)

    printed = json.loads(again("json"))
    assert {**printed, "run": 0, "environment": 0} == {**document, "run": 0, "environment": 0}
    rows = list(csv.DictReader(io.StringIO(again("csv"))))
    assert [float(row["delta_pct"]) for row in rows] == [cell["delta_pct"] for cell in document["cells"]]
    assert [row["model.preset"] for row in rows] == ["tiny-llama", "llama-3-8b"] * 2
    text = again("md")
    assert "| model.preset / workload.arrival.concurrency | 1 | 2 | break-even |" in text
    assert text.count("always") == 2


def test_results_are_stored_beside_the_document(document: dict[str, Any], kept: Path) -> None:
    names = {name for cell in document["cells"] for name in cell["results"]}
    assert {path.name for path in (kept / "runs").iterdir()} == names
    assert len(names) == 8


def test_three_axes_form_a_list(kept: Path) -> None:
    done = swept(*AXES, "--over", "page_size=1", "--output-dir", str(kept), "--resume")
    rows = [line.split() for line in done.stdout.splitlines()]
    rows = [row for row in rows if row and row[0] in ("1", "2") and "llama" in row[1]]
    assert [row[:3] for row in rows] == [
        ["1", "tiny-llama", "1"],
        ["2", "tiny-llama", "1"],
        ["1", "llama-3-8b", "1"],
        ["2", "llama-3-8b", "1"],
    ]
    assert [row[4:] for row in rows] == [[], ["always", "worse"], [], ["always", "better"]]


def test_refusals_are_footnotes() -> None:
    done = swept("--over", "chunked_prefill_size=none,32", "--set", "engine.mixed_chunk=true", "--alone")
    assert done.exit_code == 0
    assert "– [1]" in done.stdout
    assert "[1] engine.mixed_chunk: mixed chunk cannot be combined with unchunked prefill" in done.stdout
    assert " ".join(done.stdout.split()).count("tokens/s at chunked_prefill_size=32") == 1  # of both ends


def test_an_axis_of_overlap_has_one_side() -> None:
    done = swept("--over", "overlap=true,false")
    assert done.stdout.startswith(
        "output_throughput of overlap_on (emulated h200, 1 workload seed per cell): "
    )
    assert "modelled · 1 workload seed per cell · tokens/s · higher is better" in done.stdout
    assert "break-even" not in done.stdout


def test_sides_and_metric_can_be_named() -> None:
    done = swept("--over", "concurrency=2", "--a", "relay=pr25945", "--b", "relay=latest", "--metric", "tpot")
    assert " ".join(done.stdout.split()).startswith(
        "tpot_ms of overlap_on (emulated h200, 1 workload seed per cell): "
        "relay=latest against relay=pr25945 in 1 cell: 1 no change"
    )
    assert "lower is better" in done.stdout


def test_the_conclusion_has_the_extremes_and_where_the_sign_changes() -> None:
    content = synthetic({"small": (-3.0, -1.0, 2.0), "large": (1.0, 1.5, 4.0)})
    at = {"model": "small"}
    content["break_even"] = [
        {"key": "load", "at": at, "between": ["2", "4"], "beyond": "better", "drawn": FLIPS}
    ]
    assert sweep_conclusion(content) == (
        "output_throughput of made up (emulated h100 and h200, acceptance of drafts measured and simulated, "
        "1 workload seed per cell): "
        "on against off in 6 cells: 4 better, 2 worse, "
        "-3.00 % at load=1 model=small to +4.00 % at load=4 model=large; model=small better beyond load 2 … 4, "
        "1 of 1 inconclusive: CONSTANTS."
    )
    content["cells"] = []
    assert sweep_conclusion(content).endswith("no cell of the sweep has a value.")


STANDS = {"draws": 16, "holding": 16, "low": "1", "high": "4", "stands": True}
FLIPS = {**STANDS, "holding": 9, "stands": False, "constant": "host.launch", "correlation": -0.8}


@pytest.mark.parametrize(
    ("drawn", "text"),
    [
        (None, "2 … 4: better"),
        (STANDS, "2 … 4: better (16 of 16 draws, 1 … 4)"),
        (
            FLIPS,
            "2 … 4: inconclusive: CONSTANTS (9 of 16 draws, 1 … 4; follows host.launch, rank correlation -0.80)",
        ),
    ],
)
def test_break_even_names_the_neighbours(drawn: dict[str, Any] | None, text: str) -> None:
    content = synthetic({"small": (-3.0, -1.0, 2.0)})
    content["break_even"] = [
        {"key": "load", "at": {"model": "small"}, "between": ["2", "4"], "beyond": "better", "drawn": drawn}
    ]
    assert page(content)[4].split(maxsplit=4) == ["small", "-3.00", "-1.00", "+2.00", text]


@pytest.mark.parametrize("gone", ["refused", "never run"])
def test_a_row_with_cells_that_did_not_run_is_not_judged(gone: str) -> None:
    content = synthetic({"small": (3.0, 1.0, 2.0)})
    if gone == "refused":
        content["cells"][1] |= {"values": [], "delta_pct": None, "candidate": None, "refused": "no room"}
    else:
        del content["cells"][1]
    assert "1 of 3 not judged" in page(content)[4] and "always" not in "".join(page(content))


def test_doubtful_cells_are_listed() -> None:
    content = synthetic({"small": (1.0, 2.0)}, exact=False)
    content["cells"][0] |= {"candidate": None, "tokens": "different", "remark": "on: 1 of 2 requests refused"}
    lines = page(content)
    assert "+1.00 ≠ [1]" in lines[4] and "1 of 2 not judged" in lines[4]
    assert sweep_conclusion(content).endswith(
        "in 2 cells: 1 better, 1 not judged (tokens differ), +2.00 % at load=2 model=small; "
        "along load the sign changes nowhere among those judged."
    )
    assert lines[5:] == [
        "[1] on: 1 of 2 requests refused",
        "≠ the sides' tokens differ: not judged, since their work is not the same",
        "one run per side and measured times: `schedbench compare` gives the verdict over workload seeds",
    ]


def test_an_interrupted_sweep_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, asked = runs.run, []

    def interrupted(options: Any, question: Any) -> Any:
        asked.append(question)
        if len(asked) > 2:
            raise KeyboardInterrupt
        return run(options, question)

    monkeypatch.setattr(runs, "run", interrupted)
    done = swept("--over", "concurrency=1,2", "--output-dir", str(tmp_path))
    assert done.exit_code == 130
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert (content["run"]["cancelled"], len(content["cells"])) == (True, 1)
    assert "cancelled: partial" in done.stdout


def test_a_cell_that_crashes_does_not_lose_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def crashing(question: Any, *arguments: Any) -> Any:
        if question.scenario.workload.arrival.concurrency == 2:
            raise KeyError("own")
        return execute(question, *arguments)

    monkeypatch.setattr(runs, "execute", crashing)
    done = swept("--over", "concurrency=1,2,4", "--alone", "--output-dir", str(tmp_path))
    assert done.exit_code == 4
    assert "[1] KeyError: 'own'" in done.stdout
    cells = json.loads((tmp_path / "sweep.json").read_text())["cells"]
    assert [bool(cell["values"]) for cell in cells] == [True, False, True]
    assert isinstance(swept("--over", "concurrency=2", "--alone").exception, WorkloadError)


def test_a_cell_that_this_machine_cannot_run_does_not_lose_the_others() -> None:
    done = swept("--over", "kv_tokens=4096,99999999999", "--alone")
    assert done.exit_code == 0 and "[1] this run needs 2,23" in done.stdout
    assert isinstance(swept("--over", "kv_tokens=99999999999", "--alone").exception, MachineError)


def test_the_chart_has_a_line_for_each_value_of_the_other_axis():
    document = synthetic({"x": (1.0, -2.0), "y": (3.0, 4.0)})
    first, second = (axis["key"] for axis in document["sweep"]["axes"])
    (chart,) = sweep_page.charts(document)
    assert (chart.kind, chart.x) == ("line", first)
    assert [(point["x"], point["y"], point["series"]) for point in chart.points] == [
        *((1.0, 1.0, f"{second} x"), (2.0, -2.0, f"{second} x")),
        *((1.0, 3.0, f"{second} y"), (2.0, 4.0, f"{second} y")),
    ]
