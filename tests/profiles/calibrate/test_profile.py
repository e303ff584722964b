"""A profile with measured phases, which a scenario can name."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedbench.profiles.calibrate.calibration import phase_constants, to_yaml
from schedbench.profiles.calibrate.device import calibrated
from schedbench.profiles.calibrate.fit import TimedSample
from schedbench.profiles.calibrate.host import PhaseSamples, calibration_runs, fit_lines
from schedbench.profiles.platform.hardware import HardwareError, load
from schedbench.profiles.platform.resolve import ask

BASE = load("h200")
BY = {"machine": "an Unknown CPU: 3 GHz", "date": "2026-01-02"}
SAMPLES: PhaseSamples = {
    ("admit", None): [TimedSample(n, 2000 + 100 * n) for n in (0, 2, 8) for _ in range(5)],
    ("sample", None): [TimedSample(8, 700), TimedSample(8, 800), TimedSample(8, 900)],
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "here.yaml"
    path.write_text(to_yaml(calibrated(BASE, phase_constants(fit_lines(SAMPLES)), **BY, name="here")))
    return path


def test_measured_phases_have_their_origin(written: Path) -> None:
    admit = load(written).phases["admit"]
    assert (admit.a.value, admit.b.value) == pytest.approx((2000, 100), rel=1e-3)
    assert admit.a.origin == (
        "measured on an Unknown CPU: 3 GHz, 2026-01-02, 15 samples, 3 sizes, residual 0 ns, R2 1.00"
    )
    assert load(written).phases["sample"].b.origin == (
        "measured on an Unknown CPU: 3 GHz, 2026-01-02, 3 samples, one size only, residual 100 ns"
    )


def test_other_constants_are_those_of_the_base_profile(written: Path) -> None:
    found = load(written)
    for part in ("kernels", "copies", "host", "available", "links"):
        assert getattr(found, part) == getattr(BASE, part)
    assert {name: phase for name, phase in found.phases.items() if (name, None) not in SAMPLES} == {
        name: phase for name, phase in BASE.phases.items() if (name, None) not in SAMPLES
    }
    assert list(found.phases) == list(BASE.phases)
    assert found.name == "here"
    assert found.about == "h200 with 4 constants measured on an Unknown CPU: 3 GHz"


def test_a_scenario_can_name_the_profile(written: Path) -> None:
    question = ask("overlap_on", [f"device.hardware={written}"])
    assert question.hardware.name == "here"


def test_each_constant_has_its_own_line(written: Path) -> None:
    lines = written.read_text().splitlines()
    assert sum("measured on an Unknown" in line for line in lines) == 4 + 1  # and the text of ``about``


def test_every_phase_of_the_shipped_profile_has_a_calibration_run() -> None:
    plan = calibration_runs((1, 4, 16, 64), (32, 256, 1024))
    assert {name for run in plan for name in run.phases} == BASE.phases.keys()
    assert len(plan) == len(set(plan))


@pytest.mark.parametrize("batches", [(1,), (64, 128)])
def test_calibration_runs_resolve(batches: tuple[int, ...]) -> None:
    for run in calibration_runs(batches, (32, 1024)):
        ask(run.scenario, run.overrides)


def test_the_line_of_a_kind_is_written_beside_the_phases_own(tmp_path: Path) -> None:
    kinds: PhaseSamples = {
        ("sample", "decode"): [TimedSample(n, 500 + 10 * n) for n in (1, 4, 16)],
        ("sample", "prefill"): [TimedSample(n, 9000) for n in (1, 4, 16)],
        ("admit", "prefill"): [TimedSample(1, 1)],  # opens before a step's kind is known
        ("draft", "prefill"): [TimedSample(1, 1)],  # there are no decodes to differ from
    }
    path = tmp_path / "here.yaml"
    constants = phase_constants(fit_lines(SAMPLES | kinds))
    path.write_text(to_yaml(calibrated(BASE, constants, **BY, name="here")))
    found = load(path)
    lines = {kind: (line.a.value, line.b.value) for kind, line in found.phases["sample"].kinds.items()}
    assert lines == {"decode": pytest.approx((500, 10)), "prefill": pytest.approx((9000, 0), abs=1)}
    assert {name for name, phase in found.phases.items() if phase.kinds} == {"sample"}


def test_a_profile_with_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    document = calibrated(BASE, [], **BY, name="here")
    document["phases"]["sample"]["kinds"] = {"nonesuch": document["phases"]["sample"]}
    path.write_text(to_yaml(document))
    with pytest.raises(HardwareError, match="nonesuch"):
        load(path)
