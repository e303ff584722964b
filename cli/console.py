"""Consoles: results on stdout, progress on stderr, plain text where the output is not a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from .text import echo, printable

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


@contextmanager
def status(text: str = "", *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """A status line on stderr, and the function that changes it. Where stderr is not a terminal, each change is
    printed as a line if ``lines`` is set, and nothing otherwise."""
    console = progress()
    if lines and not console.is_terminal:
        yield partial(echo, err=True)
        return
    with console.status(Text(text)) as line:
        yield lambda changed: line.update(Text(changed))
