"""Progress is shown on a terminal or rarely, only for long runs, and never on stdout."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from schedbench.cli.console import RunProgress, WorkLog
from schedbench.sched.observe import LogicalClock, StepInfo

STEP = StepInfo(0, "decode", 1, 1, True)


class WallClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def wall() -> WallClock:
    return WallClock()


def drawn(wall, *, terminal, steps, seconds) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)
    clock = LogicalClock()
    with RunProgress(console, total=8, clock=clock, now=wall) as listener:
        for _ in range(steps):
            clock.sleep_until(clock.now() + 20_000_000)
            wall.time += seconds / steps
            listener.ended(None)
            listener.settled(STEP)
    return console.file.getvalue()


def test_a_line_every_ten_seconds_where_there_is_no_terminal(wall):
    lines = drawn(wall, terminal=False, steps=8, seconds=40).splitlines()
    assert lines == [f"{done} of 8 requests, {done * 0.02:.2f} s of the run" for done in (2, 4, 6, 8)]
    assert drawn(wall, terminal=False, steps=5, seconds=9) == ""


def test_work_has_the_time_left_and_few_lines(wall):
    lines = []
    log = WorkLog(lines.append, every=10.0, now=wall)
    for done in range(1, 9):
        wall.time += 5
        log(f"{done} of 8 runs")
    left = {2: ", about 30 s left", 4: ", about 20 s left", 6: ", about 10 s left", 8: ""}
    assert lines == [f"{done} of 8 runs{text}" for done, text in left.items()]


def test_a_short_run_shows_no_progress(wall):
    assert drawn(wall, terminal=True, steps=5, seconds=0.9) == ""


def test_progress_has_requests_run_time_and_rate(wall):
    text = drawn(wall, terminal=True, steps=4, seconds=8)
    assert "4/8 requests" in text
    assert "at 0.08 s" in text
    assert "0 steps/s" in text


def test_progress_is_drawn_at_a_limited_rate(wall):
    often = drawn(wall, terminal=True, steps=10_000, seconds=3)
    assert often.count("requests") < 60
