"""Break-evens under draws of the hardware's constants."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest

from schedbench.profiles.ranks.execute import Options
from schedbench.profiles.sweeps import break_even
from schedbench.profiles.sweeps.break_even import Crossing, DrawnCrossings, ask_again, crossings
from schedbench.profiles.sweeps.runs import Runs
from schedbench.profiles.sweeps.sweep import cells, planned
from tests.profiles.long_prompts import long_prompts

pytestmark = pytest.mark.wide

DRAWS = 8
LENGTHS = "workload.prompt_tokens.value=500,1000,2000,4000"


def asked_again(folder: Path, slope: tuple[float, float], *more: str) -> tuple[Crossing, DrawnCrossings]:
    """Prompts flattened as a list against NumPy, whose call costs 50 us more and whose tokens cost nothing."""
    scenario = long_prompts(folder, slope=slope, numpy=(52_000.0, 0.15))
    plan = planned(
        str(scenario), (LENGTHS, *more), sides=("flatten=list", "flatten=numpy"), metric="input_throughput"
    )
    found = list(cells(plan, Runs(Options(device="vgpu"))))
    crossing, *_ = crossings(plan, found)
    return crossing, ask_again(plan, found, DRAWS)


def test_a_run_under_draws_that_fails_does_not_lose_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(break_even, "run_each", lambda each, *_: each(operator.neg, ["no number"]))
    _, drawn = asked_again(tmp_path, (30.0, 80.0))
    assert drawn.failed and drawn.abstained.startswith("a run under draws failed: bad operand type")


def test_a_break_even_has_its_range_under_draws(tmp_path: Path) -> None:
    crossing, drawn = asked_again(tmp_path, (30.0, 80.0))
    assert crossing == ((), "500", "1000", "better")
    found = drawn.found[crossing]
    assert found.stands and (found.draws, found.holding) == (DRAWS, DRAWS)
    assert (found.low, found.high) == ("500", "2000")


def test_a_break_even_absent_under_some_draws_names_the_constant(tmp_path: Path) -> None:
    crossing, drawn = asked_again(tmp_path, (2.0, 80.0))
    found = drawn.found[crossing]
    assert not found.stands and 0 < found.holding < DRAWS
    assert found.constant == "phases.flatten.b" and found.correlation > 0.9


def test_a_sweep_over_the_hardware_has_no_constants_to_draw(tmp_path: Path) -> None:
    hardware = tmp_path / "here.yaml"
    _, drawn = asked_again(tmp_path, (30.0, 80.0), f"device.hardware={hardware}")
    assert drawn == DrawnCrossings({}, "the sweep sets device.hardware")
