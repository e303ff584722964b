"""Consoles: results on stdout, progress on stderr, plain text where the output is not a terminal."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ..sched.observe import Clock, Observer, StepInfo
from .arguments import python_call
from .text import echo, printable

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.status import Status

    from ..sched.request import Request

LINE_S = 10.0  # between two lines of progress where stderr is not a terminal
PATIENCE_S = 1.0  # shorter runs show no progress
REFRESH_S = 0.1  # of a bar
_TRAILING = re.compile(" +(?=\n)")
PIPED_WIDTH = 160  # of files and pipes, which no terminal limits, unless COLUMNS is set


class PrintableConsole(Console):
    """A console that writes no control characters but its own, and no spaces at the end of a line."""

    statement_lines: int | None = None  # that are shown at most of a folded statement

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        spaces: list[Segment] = []  # since the last other character of the line
        for segment in super().render(renderable, options):
            text = "" if segment.control else _TRAILING.sub("", printable(segment.text))
            written = text.rstrip(" ")
            if segment.control or written:
                yield from () if text.startswith("\n") else spaces
                yield segment if segment.control else segment._replace(text=written)
                spaces.clear()
            if text != written:
                spaces.append(segment._replace(text=text[len(written) :]))
        yield from spaces


def results() -> PrintableConsole:
    console = PrintableConsole(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def progress() -> Console:
    return PrintableConsole(stderr=True, highlight=False)


@dataclass(eq=False)
class WorkLog:
    """Reports the progress of a long command, with the time left. ``N of M`` in a text: N of M parts have ended.
    ``apart``: the seconds so far that the parts to come do not take, such as an engine's import."""

    write: Callable[[str], None]
    every: float = 0.0  # seconds between two texts that are written
    now: Callable[[], float] = time.monotonic
    apart: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self._written = self._since = self.now()
        self._total = self._first = 0

    def __call__(self, text: str) -> None:
        now = self.now()
        left = self._left(text, now - self.apart())
        if now - self._written >= self.every:
            self._written = now
            self.write(f"{text}{left}")

    def _left(self, text: str, now: float) -> str:
        found = re.search(r"\b(\d+) of (\d+)\b", text)
        done, total = (int(found[1]), int(found[2])) if found else (0, 0)
        if total != self._total:
            self._total, self._first, self._since = total, done, now
        elapsed, ended = now - self._since, done - self._first
        if not ended or elapsed < 1 or done >= total:
            return ""
        return f", about {elapsed / ended * (total - done):.0f} s left"


@contextmanager
def status(text: str = "", *, lines: bool = False, imports: bool = False) -> Iterator[Callable[[str], None]]:
    """A status line on stderr, and the function that changes it. Where stderr is not a terminal, a change is printed as
    a line: every one if ``lines`` is set, else at most one in LINE_S; nothing is for a call from Python. ``imports``:
    the parts to come import engines that have not been imported before."""
    if python_call.get():
        yield lambda _: None
        return
    console = progress()
    apart = (lambda: 0.0) if imports else partial(sum, _worked)
    if not console.is_terminal:
        yield WorkLog(partial(echo, err=True), every=0.0 if lines else LINE_S, apart=apart)
        return
    with _status_line(console, text) as line:
        yield WorkLog(lambda changed: line.update(Text(changed)), apart=apart)


_lines: list[Status] = []  # on the terminal, which has room for one
_worked: list[float] = []  # seconds of each block of ``working``


@contextmanager
def _status_line(console: Console, text: str) -> Iterator[Status]:
    with console.status(Text(text)) as line:
        _lines.append(line)
        try:
            yield line
        finally:
            _lines.remove(line)


@contextmanager
def working(text: str, seconds: float = 0.0) -> Iterator[None]:
    """Shows the work of the block on a terminal, in place of the status line if there is one. Such work is not done
    again in each part of a command, unless it goes on since ``seconds`` before the block."""
    console, began = progress(), time.monotonic() - seconds
    try:
        with _in_status(console, _Lasting(text, began)) if console.is_terminal else nullcontext():
            yield
    finally:
        if not seconds:
            _worked.append(time.monotonic() - began)


class _Lasting(NamedTuple):
    """Work that began at that time, with the seconds so far each time that it is drawn."""

    text: str
    began: float

    def __str__(self) -> str:
        return f"{self.text}: {time.monotonic() - self.began:.0f} s"

    def __rich__(self) -> Text:
        return Text(str(self))


@contextmanager
def _in_status(console: Console, work: _Lasting) -> Iterator[None]:
    with nullcontext(_lines[0]) if _lines else _status_line(console, "") as line:
        before = line.status
        line.update(work)
        try:
            yield
        finally:
            line.update(before)


@dataclass(eq=False)
class RunProgress(Observer):
    """An observer that draws the requests done, the time of the run, steps per second and the time left.

    ``now`` is wall time in seconds; ``clock`` is that of the run. Between refreshes a step costs one comparison.
    """

    console: Console
    total: int | None
    clock: Clock
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.now()
        self._due = self._began + (PATIENCE_S if self.console.is_terminal else LINE_S)
        self._steps = self._done = 0
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def settled(self, info: StepInfo) -> None:  # noqa: ARG002
        self._steps += 1
        now = self.now()
        if now < self._due:
            return
        if self.console.is_terminal:
            self._due = now + REFRESH_S
            self._draw(now)
        else:
            self._due = now + LINE_S
            seconds = self.clock.now() / 1e9
            echo(f"{self._done} of {self.total} requests, {seconds:.2f} s of the run", err=True)

    def ended(self, request: Request) -> None:  # noqa: ARG002
        self._done += 1

    def _draw(self, now: float) -> None:
        if self._bar is None:
            self._bar = _bar(self.console)
            self._bar.add_task("run", total=self.total, run="", rate="")
            self._bar.start()  # may be interrupted, and is then stopped as well
        self._bar.update(
            self._bar.task_ids[0],
            completed=self._done,
            run=f"{self.clock.now() / 1e9:.2f} s",
            rate=f"{self._steps / (now - self._began):,.0f} steps/s",
        )
        self._bar.refresh()


def run_progress(clock: Clock, total: int) -> AbstractContextManager[Observer]:
    """The observer that shows the progress of a run on stderr; of one that Python calls for, nothing."""
    if python_call.get():
        return nullcontext(Observer())
    return RunProgress(progress(), total=total, clock=clock)


def _bar(console: Console) -> Progress:
    """A bar that does not redirect stdout and stderr, which the result goes to."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        MofNCompleteColumn(),
        TextColumn("requests"),
        BarColumn(bar_width=None),
        TextColumn("at {task.fields[run]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
