"""Consoles: results on stdout, progress on stderr, plain text where the output is not a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import typer
from rich.console import Console

PIPED_WIDTH = 120  # of files and pipes, unless COLUMNS is set


def results() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def progress() -> Console:
    return Console(stderr=True, highlight=False)


@contextmanager
def status(text: str = "", *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """A status line on stderr, and the function that changes it. Where stderr is not a terminal, each change is
    printed as a line if ``lines`` is set, and nothing otherwise."""
    console = progress()
    if lines and not console.is_terminal:
        yield partial(typer.echo, err=True)
        return
    with console.status(text) as line:
        yield line.update
