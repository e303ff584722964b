"""Progress is shown on a terminal or rarely, only for long runs, and never on stdout."""

from __future__ import annotations

import io
from contextlib import contextmanager
from functools import partial

import pytest
from rich.console import Console

from schedbench.cli import console
from schedbench.cli.console import RunProgress, WorkLog
from schedbench.profiles.engines.client import end_engines, opened_engine
from schedbench.profiles.platform import engine_choice
from schedbench.sched.observe import LogicalClock, StepInfo
from tests.profiles.engines.checkouts import write_package
from tests.profiles.engines.conftest import ADAPTER, QUIET

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
    drawing = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)
    clock = LogicalClock()
    with RunProgress(drawing, total=8, clock=clock, now=wall) as listener:
        for _ in range(steps):
            clock.sleep_until(clock.now() + 20_000_000)
            wall.time += seconds / steps
            listener.ended(None)
            listener.settled(STEP)
    return drawing.file.getvalue()


def test_a_line_every_ten_seconds_where_there_is_no_terminal(capsys, wall):
    drawn(wall, terminal=False, steps=8, seconds=40)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{done} of 8 requests, {done * 0.02:.2f} s of the run" for done in (2, 4, 6, 8)]
    drawn(wall, terminal=False, steps=5, seconds=9)
    assert not capsys.readouterr().err


def test_work_has_the_time_left_and_few_lines(wall):
    lines = []
    log = WorkLog(lines.append, every=10.0, now=wall)
    for done in range(1, 9):
        wall.time += 5
        log(f"{done} of 8 runs")
    left = {2: ", about 30 s left", 4: ", about 20 s left", 6: ", about 10 s left", 8: ""}
    assert lines == [f"{done} of 8 runs{text}" for done, text in left.items()]


@pytest.mark.parametrize(("imports", "left"), [(False, 60), (True, 110)])
def test_the_time_left_has_no_import_that_is_not_made_again(monkeypatch, capsys, wall, imports, left):
    monkeypatch.setattr(console, "LINE_S", 0.0)
    monkeypatch.setattr(console.time, "monotonic", wall)
    monkeypatch.setattr(console, "WorkLog", partial(WorkLog, now=wall))
    with console.status(imports=imports) as update:
        update("1 of 10 runs")
        with console.working("importing the other side's engine"):
            wall.time += 25
        for done in (2, 3, 4):
            wall.time += 10
            update(f"{done} of 10 runs")
    assert capsys.readouterr().err.splitlines()[-1] == f"4 of 10 runs, about {left} s left"


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


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that makes stderr a terminal or a pipe and returns what is written to it."""

    def replaced(*, terminal: bool) -> io.StringIO:
        file = io.StringIO()
        monkeypatch.setattr(
            console,
            "progress",
            lambda: Console(file=file, force_terminal=terminal, width=80, color_system=None),
        )
        return file

    return replaced


def test_work_is_shown_with_its_time_on_a_terminal_only(stderr, monkeypatch, wall):
    monkeypatch.setattr(console.time, "monotonic", wall)
    shown = stderr(terminal=True)
    with console.working("importing sglang"):
        wall.time += 12
    with console.working("sglang: waiting for the run", 10.0):
        wall.time += 3
    assert "importing sglang: 12 s" in shown.getvalue()
    assert "sglang: waiting for the run: 13 s" in shown.getvalue()
    piped = stderr(terminal=False)
    with console.working("importing sglang"):
        pass
    assert piped.getvalue() == ""


def test_work_takes_the_place_of_the_status_line(stderr):
    stderr(terminal=True)
    with console.status("3 of 10 runs") as update:
        [line] = console._lines
        with console.working("importing sglang"):
            assert str(line.status) == "importing sglang: 0 s"
        assert str(line.status) == "3 of 10 runs"
        update("4 of 10 runs")
        assert str(line.status) == "4 of 10 runs"
    assert console._lines == []


@pytest.mark.wide
def test_an_engine_says_that_it_is_read_and_imported(monkeypatch, tmp_path):
    seen = []

    @contextmanager
    def show(text, seconds):  # noqa: ARG001
        seen.append(text)
        yield

    monkeypatch.setattr(engine_choice, "_shown", show)
    write_package(tmp_path / "python" / "toy", QUIET)
    name = f"{ADAPTER}:{tmp_path}"
    opened_engine(engine_choice.EngineChoice(name)).start()
    end_engines()
    assert seen == [f"reading the source of {name}", f"importing {name}"]
