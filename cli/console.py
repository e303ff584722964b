"""Consoles: results on stdout, progress on stderr, plain text where the output is not a terminal."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from .text import echo, printable

Clock = Callable[[], float]
LINE_S = 10.0  # between two lines of progress where stderr is not a terminal
PIPED_WIDTH = 120  # of files and pipes, unless COLUMNS is set


class PrintableConsole(Console):
    """A console that writes no control characters but its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def results() -> Console:
    console = PrintableConsole(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def progress() -> Console:
    return PrintableConsole(stderr=True, highlight=False)


class WorkLog:
    """Reports the progress of a long command, with the time left. ``N of M`` in a text: N of M parts have ended."""

    def __init__(
        self, write: Callable[[str], None], *, every: float = 0.0, now: Clock = time.monotonic
    ) -> None:
        self._write = write
        self._every = every  # seconds between two texts that are written
        self._now = now
        self._written = self._since = now()
        self._total = self._first = 0

    def __call__(self, text: str) -> None:
        now = self._now()
        left = self._left(text, now)
        if now - self._written >= self._every:
            self._written = now
            self._write(f"{text}{left}")

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
def status(text: str = "", *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """A status line on stderr, and the function that changes it. Where stderr is not a terminal, a change is printed as
    a line: every one if ``lines`` is set, else at most one in LINE_S."""
    console = progress()
    if not console.is_terminal:
        yield WorkLog(partial(echo, err=True), every=0.0 if lines else LINE_S)
        return
    with console.status(Text(text)) as line:
        yield WorkLog(lambda changed: line.update(Text(changed)))
