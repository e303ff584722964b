"""The host's phases, measured in small runs, whose figures only have to be plausible."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from schedbench.profiles.calibrate import calibration
from schedbench.profiles.calibrate.calibration import main, probed
from schedbench.profiles.calibrate.host import (
    PhaseSamples,
    calibration_runs,
    fit_lines,
    measure,
    through_torch,
    without_calls,
)
from schedbench.profiles.platform.hardware import load
from schedbench.sched.batch import ScheduleBatch
from schedbench.sched.loop import prepare
from schedbench.sched.loop.engine import Engine

pytestmark = pytest.mark.wide

BASE = load("h200")
DEVICE_CALLS = {"launch", "copy_call", "event_record", "sync_return", "graph_launch", "pin_memory"}


@pytest.fixture(scope="module")
def samples() -> PhaseSamples:
    return measure(BASE, calibration_runs((1, 4), (32,)), rounds=1)[0]


def test_every_phase_of_the_profile_is_measured(samples: PhaseSamples) -> None:
    assert {name for name, kind in samples if kind is None} == BASE.phases.keys()


def test_a_phase_takes_between_a_tenth_of_a_microsecond_and_some_milliseconds(samples: PhaseSamples) -> None:
    for name, line in fit_lines(samples).items():
        assert 100 < line.at(4) < 5e6, name


def test_phases_have_the_sizes_of_the_batches(samples: PhaseSamples) -> None:
    assert {sample.n for sample in samples["settle", None]} == {1, 4}
    assert {sample.n for sample in samples["flatten", None]} == {32, 128}


def test_time_added_to_a_phase_is_found(monkeypatch: pytest.MonkeyPatch, samples: PhaseSamples) -> None:
    """Two milliseconds of processor time and one per request are added to the phase's own time."""
    place = prepare.fused_tokens

    def slowly(engine: Engine, batch: ScheduleBatch) -> None:
        busy(2_000_000 + 1_000_000 * batch.batch_size)
        place(engine, batch)

    monkeypatch.setattr(prepare, "fused_tokens", slowly)
    plan = [run for run in calibration_runs((1, 4), (32,)) if "prepare" in run.phases]
    by_itself, line = (
        fit_lines(found)["prepare", None] for found in (samples, measure(BASE, plan, rounds=1)[0])
    )
    assert line.a - by_itself.a == pytest.approx(2e6, rel=0.25)
    assert line.b - by_itself.b == pytest.approx(1e6, rel=0.25)


def busy(ns: int) -> None:
    end = time.thread_time_ns() + ns
    while time.thread_time_ns() < end:
        pass


def test_a_device_call_costs_torch_some_microseconds() -> None:
    assert 100 < through_torch(without_calls(BASE)) < 100_000


def test_calls_of_a_device_without_calls_take_no_time() -> None:
    silent = without_calls(BASE)
    assert {quantity.value for _, quantity in silent.host if quantity is not None} == {0}
    assert dict(silent.host).keys() >= DEVICE_CALLS
    assert silent.phases == {}
    assert silent.kernels == BASE.kernels


def test_a_failing_probe_is_reported_and_left_out() -> None:
    """Without CUDA all probes fail."""
    words: list[str] = []
    assert probed(words.append, python="/bin/false") == {}
    assert [word for word in words if "failed: exit code" in word] == [
        f"probe {name} failed: exit code 1" for name in ("environment", "costs", "copies", "kernels")
    ]


def test_earlier_probes_are_used_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: PhaseSamples
) -> None:
    monkeypatch.setattr(calibration, "measure", lambda *_, **__: (samples, {}))
    spread = {"n": 9, "p10": 1, "median": 800, "p90": 1000}
    costs = {"events": dict.fromkeys(("record", "wait", "stream_synchronize_done"), spread)}
    (tmp_path / "probe-costs.json").write_text(json.dumps(costs))
    (tmp_path / "probe-environment.json").write_text('{"gpu": "A GPU"}')
    output = tmp_path / "ours.yaml"
    small = ["--batch-sizes", "1", "--prompt-tokens", "32"]
    assert main(["--probes", str(tmp_path), *small, "--output", str(output)]) == 0
    assert load(output).host.event_wait.value == 800
    assert load(output).host.event_wait.origin.startswith("measured on A GPU, ")
    report = json.loads(output.with_suffix(".json").read_text())
    assert report["machine"].startswith("A GPU, ")
    assert "launches: the probe costs does not have it (KeyError: 'launch')" in report["missing"]
