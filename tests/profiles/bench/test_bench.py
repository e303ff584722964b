"""What the bench compares: two sides in turn, by processor time, and when a figure counts as worse."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedbench.cli.app import app
from schedbench.profiles.bench import bench, parts
from schedbench.profiles.bench.bench import ROUNDS, BenchFigure, ProcessError, Processes, conclusion, measured


def compared(*ratios: float) -> BenchFigure:
    return BenchFigure("a figure", "s", 1.0, [2.0 * ratio for ratio in ratios], [2.0] * len(ratios))


@pytest.mark.parametrize(
    ("ratios", "worse"),
    [
        ((1.10, 1.12, 1.11, 1.11, 1.11), True),
        ((1.10, 1.30, 1.11, 1.11, 1.11), False),  # as much as the ratios differ from one another
        ((0.99, 1.12, 1.11, 1.11, 1.11), False),
        ((0.5, 0.51, 0.5, 0.5, 0.5), False),
    ],
)
def test_a_figure_is_worse_by_more_than_its_noise(ratios: tuple[float, ...], worse: bool) -> None:
    row = compared(*ratios)
    assert row.worse == worse
    assert conclusion([row]).endswith(f"noise: {'a figure' if worse else 'none'}.")


def test_few_rounds_do_not_decide_what_is_worse() -> None:
    row = compared(1.10, 1.12, 1.11)
    assert row.worse is None
    assert conclusion([row]).endswith(
        "Fewer than 5 rounds do not tell which are worse by more than their noise."
    )


def test_equal_versions_are_seldom_called_worse() -> None:
    """In less than 10 % of comparisons one of 13 figures is."""
    noise = random.Random(1)
    called = sum(
        any(compared(*(noise.gauss(1, 0.02) for _ in range(ROUNDS))).worse for _ in range(13))
        for _ in range(1000)
    )
    assert called < 100


def test_a_figure_without_another_commit_is_not_worse() -> None:
    row = BenchFigure("a figure", "s", 0.1, [0.2, 0.1, 0.3])
    assert (row.value, row.met, row.worse, row.ratios) == (0.2, False, None, [])
    assert conclusion([row]) == "0 of 1 aims are met; missed: a figure."


def test_sides_alternate_and_a_step_costs_the_difference_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def usage(self: Processes, *arguments: str) -> bench.Usage:
        other = self._environment.get("PYTHONPATH", "").startswith("/other")
        asked.append(other)
        long = any(f"value: {8 + 1000}" in argument for argument in arguments)
        return bench.Usage(3.0 + long * (2.0 if other else 1.0), 100.0)

    monkeypatch.setattr(Processes, "usage", usage)
    (row,) = measured(None, 3, Path("/other"), "50 running, latest")
    assert row.ratios == pytest.approx([0.5] * 3)
    assert row.value == pytest.approx(1000.0)
    assert asked[::2] == [False, True, True, False, False, True]


def test_an_interruption_ends_the_process_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def interrupted(process: int, _: int) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "wait4", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Processes().usage("-c", "import time; time.sleep(60)")
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_the_time_of_a_process_is_its_processor_time() -> None:
    begin = time.perf_counter()
    used = Processes().usage("-c", "import time; time.sleep(0.5)")
    assert 0 < used.seconds < time.perf_counter() - begin - 0.4 and used.mib > 1
    with pytest.raises(ProcessError, match="exit code 3: why"):
        Processes().usage("-c", "import sys; print('why'); sys.exit(3)")
    assert Processes().usage("-c", "raise SystemExit(1)").seconds > 0, (
        "a run whose budget is broken is measured"
    )


@pytest.mark.parametrize("options", [["--gate"], ["--gate", "--against", "HEAD", "--rounds", "4"]])
def test_a_gate_needs_another_commit_and_rounds(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", *options])
    assert isinstance(done.exception, Exception) and "--gate needs --against REF" in str(done.exception)


@pytest.mark.parametrize("measure", [lambda: parts.decode_step_us(2), lambda: parts.admission_us(48)])
def test_a_figure_is_between_zero_and_some_microseconds(measure) -> None:  # type: ignore[no-untyped-def]
    assert 1 < measure() < 1e6
