"""Speed compared with the machine's limits, for synthetic results with known figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedbench.profiles.lab.speed import document, figures, main, over_roofline
from schedbench.profiles.record.definitions import definition
from schedbench.profiles.record.result import Metric, Result
from tests.acceptance.runs import result_of

SAMPLE = Result.from_json((Path(__file__).parents[1] / "sample_result.json").read_text())
GOOD = {
    "forward_ms.decode": 6.0,
    "idle_ms": 0.01,
    "decode_roofline_ms": 5.5,
    "forward_occupancy": 0.996,
    "output_throughput": 7000.0,
    "decode_bandwidth": 4000.0,
}
COST = {
    "sides": ["bare", "timed"], "device": "A GPU", "emulated": False, "percent": 0.4, "interval": [0.1, 0.7],
    "step_ms": 1.0, "us_per_step": 4.0, "pairs": 10, "bar_percent": 1.0, "met": True,
}  # fmt: skip


def run(
    values: dict[str, float], *, preset: str = "llama-3-8b", running: int = 64, emulated: bool = False
) -> Result:
    metrics = {
        name: Metric(
            unit=definition(name).unit,
            direction=definition(name).direction,
            values=(value,),
            n=200,
            p50=value,
        )
        for name, value in values.items()
    }
    expanded: dict[str, Any] = {
        **SAMPLE.scenario.expanded,
        "model": {"preset": preset},
        "engine": {"max_running_requests": running},
        "device": {"hardware": "h200"},
    }
    labels = SAMPLE.labels.model_copy(update={"emulated": emulated})
    scenario = SAMPLE.scenario.model_copy(update={"expanded": expanded})
    return SAMPLE.model_copy(update={"metrics": metrics, "labels": labels, "scenario": scenario})


def verdicts(result: Result) -> dict[str, bool | None]:
    return {figure["name"]: figure["met"] for figure in figures(result) if figure["bar"]}


@pytest.mark.parametrize(
    ("values", "missed"),
    [
        ({}, None),
        ({"forward_ms.decode": 6.4}, "decode step over roofline"),
        ({"forward_occupancy": 0.993}, "forward occupancy"),
        ({"idle_ms": 0.021}, "idle between steps p50"),
    ],
)
def test_a_good_run_meets_every_limit_and_each_can_be_missed(
    values: dict[str, float], missed: str | None
) -> None:
    limits = ("decode step over roofline", "forward occupancy", "idle between steps p50")
    assert verdicts(run(GOOD | values)) == {name: name != missed for name in limits}


def test_idle_before_a_step_counts_towards_the_step() -> None:
    ratio = over_roofline(run({"forward_ms.decode": 6.0, "idle_ms": 1.0, "decode_roofline_ms": 5.0}))
    assert ratio == pytest.approx(1.4)


def test_other_models_and_batches_have_no_limits() -> None:
    assert verdicts(run(GOOD, preset="qwen3-0.6b")) == verdicts(run(GOOD, running=256)) == {}


def test_emulated_runs_and_missing_figures_have_limits_and_no_verdict() -> None:
    for result in (run(GOOD, emulated=True), run({"output_throughput": 1.0})):
        assert set(verdicts(result).values()) == {None}


def test_a_cancelled_run_is_marked_as_partial() -> None:
    part = run(GOOD)
    part = part.model_copy(update={"run": part.run.model_copy(update={"cancelled": True})})
    (part_document,) = document([("speed-8b", part)], [])["runs"]
    assert part_document["evidence"].endswith(", cancelled: partial")


def test_emulated_or_unmeasured_overhead_has_no_verdict() -> None:
    unmeasured = {"sides": ["timed", "nvtx"], "abstained": "no tool"}
    report = document([], [COST | {"emulated": True}, unmeasured])
    assert (report["met"], report["missed"], report["undecided"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("values", "met", "code"),
    [
        ({}, True, 0),
        ({"idle_ms": 0.021}, True, 1),  # a limit of the run is missed
        ({}, False, 1),  # the cost of measuring is above its limit
        ({}, None, 1),  # or its interval contains the limit
    ],
)
def test_a_limit_that_is_missed_or_undecided_fails(
    tmp_path: Path, values: dict[str, float], met: bool | None, code: int
) -> None:
    run(GOOD | values).write(tmp_path / "speed-8b.json")
    (tmp_path / "overhead.json").write_text(json.dumps(COST | {"met": met}))
    assert main([str(tmp_path), "speed-8b"]) == code


def test_a_limit_without_its_figure_fails(tmp_path: Path) -> None:
    run({"output_throughput": 1.0}).write(tmp_path / "speed-8b.json")
    assert main([str(tmp_path), "speed-8b"]) == 1
    assert json.loads((tmp_path / "speed.json").read_text())["undecided"] == 3


@pytest.mark.wide
def test_a_run_of_the_virtual_gpu_has_all_figures(tmp_path: Path) -> None:
    fewer = ("workload.requests=16", "workload.prompt_tokens=16", "workload.output_tokens=128")
    result_of("throughput", *fewer, "measure.warmup_requests=0").write(tmp_path / "speed-0.6b.json")
    (tmp_path / "overhead.json").write_text(json.dumps(COST))
    assert main([str(tmp_path), "speed-8b", "speed-0.6b"]) == 0
    report = json.loads((tmp_path / "speed.json").read_text())
    assert report["missing"] == ["speed-8b"]
    (found,) = report["runs"]
    assert found["evidence"] == "emulated on h200"
    assert found["roofline"].startswith("4,300 GB/s of hardware profile h200: measured on an H200")
    assert all(figure["value"] is not None for figure in found["figures"])
