"""Consoles: results on stdout, progress on stderr, plain text when nobody looks."""

from __future__ import annotations

import os

from rich.console import Console

PIPED_WIDTH = 120  # a file has no width; COLUMNS says otherwise


def results() -> Console:
    return _sized(Console(highlight=False))


def progress() -> Console:
    return Console(stderr=True, highlight=False)


def _sized(console: Console) -> Console:
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console
