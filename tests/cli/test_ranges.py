"""``schedbench run --ranges``: the headline figures with their range under draws of the hardware's constants."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from schedbench.cli.page import markdown
from schedbench.cli.pictures import run_charts
from schedbench.cli.result_page import csv_of, page
from tests.conftest import RunCommand

TINY = (
    *("--device", "vgpu", "--set", "requests=1", "--set", "prompt_tokens=16", "--set", "output_tokens=4"),
    *("--set", "values=none", "--set", "max_running_requests=1", "--set", "warmup_requests=0"),
)


def test_every_format_has_figures_with_their_ranges(run_command: RunCommand) -> None:
    done = run_command("run", "mixed", *TINY, "--ranges", "--format", "json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    metrics, extents = document["metrics"], document["ranges"]["metrics"]
    assert document["ranges"]["draws"] == 16
    for name in ("output_throughput", "ttft_ms", "tpot_ms", "step_ms", "forward_idle_us_per_step"):
        assert extents[name]["low"] < metrics[name]["values"][0] < extents[name]["high"]

    extent = extents["ttft_ms"]
    [row] = [row for row in csv.DictReader(io.StringIO(csv_of([document]))) if row["metric"] == "ttft_ms"]
    assert (float(row["low"]), float(row["high"])) == (extent["low"], extent["high"])
    [chart] = [chart for chart in run_charts(document) if chart.title.startswith("ranges under 16 draws")]
    [point] = [point for point in chart.points if point["y"] == "ttft_ms"]
    value = metrics["ttft_ms"]["values"][0]
    assert point["high"] == 100 * (extent["high"] / value - 1) > 0 > point["low"]  # type: ignore[operator]
    lines = markdown(page(document, 160)).splitlines()
    assert any(line.startswith("| ttft_ms | ms |") and extent["follows"] in line for line in lines)


def test_interrupted_draws_leave_the_run_whole(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("schedbench.profiles.judge.local.ranges", interrupted)
    done = run_command("run", "mixed", *TINY, "--ranges", "--output-dir", tmp_path)
    said = " ".join(done.out.split())
    assert (
        done.code == 130
        and "output tokens/s (emulated h200); " in said
        and "further runs interrupted" in said
    )
    run = json.loads((tmp_path / "result.json").read_text())["run"]
    assert (run["cancelled"], run["further_cancelled"]) == (False, True)
