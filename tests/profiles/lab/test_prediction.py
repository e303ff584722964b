"""Emulated times compared with measured ones, for synthetic results with known errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedbench.profiles.lab import prediction_runs
from schedbench.profiles.lab.prediction import (
    HOST_TIMES,
    METRICS,
    Pair,
    file,
    gathered,
    main,
    prediction,
)
from schedbench.profiles.record.definitions import DEFINITIONS
from schedbench.profiles.record.result import Abstained, Metric, Result

SAMPLE = Result.from_json((Path(__file__).parents[1] / "sample_result.json").read_text())
STALL = "exposed_stall_us_per_step"
PLAIN = {"output_throughput", "forward_occupancy", STALL}


def run(**values: float | None) -> Result:
    """Returns a result with these metrics; for a distribution the value is the median, and the mean is another one."""
    metrics: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            metrics[name] = Abstained(abstained="not measured")
            continue
        fields = {} if name in PLAIN else {"n": 9, "p50": value}
        mean = value if name in PLAIN else 3 * value
        metrics[name] = SAMPLE.metrics[name].model_copy(
            update={"values": (mean,), "n": None, "p50": None} | fields
        )
    return SAMPLE.model_copy(update={"metrics": metrics})


def pair(state: str, emulated: dict[str, Any], measured: dict[str, Any], scenario: str = "mixed") -> Pair:
    return Pair(scenario, state, run(**emulated), run(**measured))


def test_every_metric_that_is_compared_exists() -> None:
    assert set(METRICS) <= DEFINITIONS.keys()


@pytest.mark.parametrize(
    ("emulated", "measured", "errors", "median", "finding"),
    [
        # relative to what was measured
        (
            {"step_ms": 1.1, "output_throughput": 95.0},
            {"step_ms": 1.0, "output_throughput": 100.0},
            {"step_ms": 0.1, "output_throughput": -0.05},
            0.075,
            "median error 7.5 %, goal below 5.0 %",
        ),
        # against 0 absolute, in microseconds per step, which counts beside a small median error
        (
            {"step_ms": 1.0, STALL: 40.0},
            {"step_ms": 1.0, STALL: 0.0},
            {"step_ms": 0.0, STALL: 40.0},
            0.0,
            "errors where 0 was measured: 1",
        ),
        ({"step_ms": None, "tpot_ms": 1.0}, {"step_ms": 1.0}, {}, None, "metrics of one side only: 2"),
        ({"step_ms": None}, {"step_ms": None}, {}, None, "nothing was compared"),
    ],
)
def test_errors_and_the_finding(emulated: Any, measured: Any, errors: Any, median: Any, finding: str) -> None:
    found = prediction([pair("latest", emulated, measured)])
    shown = {
        row["metric"]: row["absolute"] if row["error"] is None else row["error"] for row in found["errors"]
    }
    assert {name: error for name, error in shown.items() if error is not None} == pytest.approx(errors)
    assert (found["median_error"], found["findings"]) == (pytest.approx(median), [finding])


@pytest.mark.parametrize(
    ("emulated", "measured", "error"),
    [(0.2, 0.6, None), (0.0, 0.0, None), (4.0, 8.0, -0.5), (8.0, 0.0, None)],
)
def test_negligible_stalls_have_no_error(emulated: float, measured: float, error: float | None) -> None:
    found = prediction([pair("x", {STALL: emulated}, {STALL: measured})])
    assert [row["error"] for row in found["errors"] if row["metric"] == STALL] == [error]


Two = tuple[float, float]


def ladder(emulated: Two, measured: Two, metric: str = "step_ms") -> list[Pair]:
    sides = zip(("pr25774", "pr25945"), emulated, measured, strict=True)
    return [pair(state, {metric: e}, {metric: m}) for state, e, m in sides]


@pytest.mark.parametrize(
    ("metric", "emulated", "measured", "agree"),
    [
        ("step_ms", (1.0, 0.9), (1.0, 0.95), True),
        ("step_ms", (1.0, 1.1), (1.0, 1.3), True),
        ("step_ms", (1.0, 0.9), (1.0, 1.1), False),
        ("step_ms", (1.0, 0.9), (1.0, 1.01), None),  # measurement calls none
        ("step_ms", (1.0, 1.0), (1.0, 1.5), None),  # emulation calls none
        # A change from zero has a sign and no size.
        (STALL, (0.0, 40.0), (50.0, 0.0), False),
        (STALL, (0.0, 40.0), (0.0, 30.0), True),
        (STALL, (0.0, 0.5), (50.0, 0.0), None),  # negligible
    ],
)
def test_signs_are_compared_where_both_call_a_difference(
    metric: str, emulated: Two, measured: Two, agree: bool | None
) -> None:
    (change,) = prediction(ladder(emulated, measured, metric))["changes"]
    named = [change[name] for name in ("before", "after", "metric", "agree")]
    assert named == ["pr25774", "pr25945", metric, agree]
    assert (change["emulated"] is None) == (metric == STALL)


def test_a_wrong_sign_misses_the_goal_for_any_error() -> None:
    assert prediction(ladder((1.0, 0.97), (0.97, 1.0)))["findings"] == ["signs of changes that differ: 1"]
    assert prediction(ladder((1.0, 0.97), (1.0, 0.97)))["findings"] == []


def test_scenarios_are_not_compared_with_each_other() -> None:
    a, b = ladder((1.0, 0.9), (1.0, 0.9))
    assert prediction([a, b._replace(scenario="other")])["changes"] == []


def test_each_scenario_has_its_own_error() -> None:
    pairs = [pair("latest", {"step_ms": e}, {"step_ms": 1.0}, name) for e, name in ((1.1, "a"), (0.7, "b"))]
    found = prediction(pairs)
    assert found["by_scenario"] == {"a": pytest.approx(0.1), "b": pytest.approx(0.3)}


def test_pairs_are_read_from_the_files_of_the_stages(tmp_path: Path) -> None:
    for side, value in (("emulated", 2.0), ("measured", 1.0)):
        run(step_ms=value).write(tmp_path / file("mixed:latest", side))
    run(step_ms=1.0).write(tmp_path / file("mixed:pr25945", "measured"))
    pairs, missing = gathered(tmp_path, ["mixed:pr25945", "mixed:latest"])
    assert [(one.scenario, one.state) for one in pairs] == [("mixed", "latest")]
    assert missing == ["mixed pr25945"]
    assert main([str(tmp_path), "mixed:pr25945", "mixed:latest"]) == 1
    written = json.loads((tmp_path / "prediction.json").read_text())
    assert (written["median_error"], written["findings"][1:]) == (1.0, ["not run: mixed pr25945"])


def test_the_host_times_of_an_emulated_run_are_compared(tmp_path: Path) -> None:
    question = "mixed:latest"
    words = [question, "--device", "vgpu", "--folder", str(tmp_path), "--set", "workload.requests=4"]
    for side in ("measured", "emulated"):
        assert prediction_runs.run(question, prediction_runs.parse(words)).reason == ""
        (tmp_path / file(question, "emulated")).rename(tmp_path / file(question, side))
    (pair,), _ = gathered(tmp_path, [question])
    rows = prediction([pair])["host_us_per_step"]
    assert {"prepare", "model", "sample", "settle"} <= {row["range"] for row in rows}
    assert all(row["emulated"] == row["measured"] >= 0 for row in rows)
    # The host is the bottleneck of a tiny model: its ranges make up the steps.
    steps = pair.emulated.metrics["step_ms"]
    assert isinstance(steps, Metric)
    assert sum(row["emulated"] for row in rows) == pytest.approx(1e3 * steps.values[0], rel=0.5)


def test_the_largest_difference_of_host_times_comes_first() -> None:
    host = [{"environment": {HOST_TIMES: times}} for times in ({"a": 5.0, "b": 1.0}, {"a": 6.0, "c": 9.0})]
    emulated, measured = (run(step_ms=1.0).model_copy(update=each) for each in host)
    rows = prediction([Pair("mixed", "latest", emulated, measured)])["host_us_per_step"]
    assert [(row["range"], row["emulated"], row["measured"]) for row in rows] == [
        ("c", 0.0, 9.0),
        ("a", 5.0, 6.0),
        ("b", 1.0, 0.0),
    ]


def test_a_pair_within_the_goal_passes(tmp_path: Path) -> None:
    for side in ("emulated", "measured"):
        run(step_ms=1.0).write(tmp_path / file("mixed:latest", side))
    assert main([str(tmp_path), "mixed:latest"]) == 0
    assert main([str(tmp_path), "mixed:latest", "mixed:pr25945"]) == 1


def test_without_runs_the_stage_says_so_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "mixed:latest"]) == 1
    assert capsys.readouterr().out == "nothing was compared; not run: mixed latest\n"
