"""``schedbench explain``: print the definitions of metrics."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import textwrap
from typing import Annotated

import typer

from .errors import UsageError
from .text import cut_right, echo

WIDTH = 80  # of prose where stdout is not a terminal


def explain(
    metric: Annotated[str | None, typer.Argument(help="A metric or counter; without one, all names.")] = None,
) -> None:
    """Print how a metric is defined."""
    echo(_all() if metric is None else _one(metric))


def _all() -> str:
    from ..profiles.record.definitions import DEFINITIONS

    entries = DEFINITIONS.values()
    names, units = (max(len(getattr(entry, field)) for entry in entries) for field in ("name", "unit"))
    lines = [f"{e.name:{names}}  {e.unit:{units}}  {e.about}" for e in entries]
    width = _width()
    return "\n".join(lines if width is None else (cut_right(line, width) for line in lines))


def _width() -> int | None:
    """The width of the terminal, or COLUMNS. None for a pipe, for which no line is cut."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


def _one(metric: str) -> str:
    from ..profiles.record.definitions import DEFINITIONS, definition

    try:
        entry = definition(metric)
    except KeyError:
        near = difflib.get_close_matches(metric, DEFINITIONS, n=1)
        meant = f", did you mean '{near[0]}'?" if near else "; `schedbench explain` lists them"
        raise UsageError(f"no metric '{metric}'{meant}") from None
    better = {"higher": "higher is better", "lower": "lower is better", "none": "neither is better"}
    rows = (("formula", entry.formula), ("source", entry.source))
    width = _width() or WIDTH
    details = "\n".join(_labelled(label, text, width=width) for label, text in rows)
    head = f"{metric}  [{entry.unit}, {better[entry.direction]}]"
    return f"{head}\n\n{textwrap.fill(entry.about, width)}\n\n{details}"


def _labelled(label: str, text: str, *, width: int) -> str:
    return textwrap.fill(text, width, initial_indent=f"{label:9}", subsequent_indent=" " * 9)
