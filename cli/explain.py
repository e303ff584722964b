"""``schedbench explain``: what a number means, from the table that the results are made with."""

from __future__ import annotations

import difflib
import textwrap
from typing import Annotated

import typer

from .errors import UsageError
from .numbers import cut_right

WIDTH = 80


def explain(
    metric: Annotated[str | None, typer.Argument(help="A metric or counter; without one, all names.")] = None,
) -> None:
    """Print how a metric is defined."""
    typer.echo(_all() if metric is None else _one(metric))


def _all() -> str:
    from ..profiles.definitions import DEFINITIONS

    entries = DEFINITIONS.values()
    names, units = (max(len(getattr(entry, field)) for entry in entries) for field in ("name", "unit"))
    return "\n".join(cut_right(f"{e.name:{names}}  {e.unit:{units}}  {e.about}", WIDTH) for e in entries)


def _one(metric: str) -> str:
    from ..profiles.definitions import DEFINITIONS, definition

    try:
        entry = definition(metric)
    except KeyError:
        near = difflib.get_close_matches(metric, DEFINITIONS, n=1)
        meant = f", did you mean '{near[0]}'?" if near else "; `schedbench explain` lists them"
        raise UsageError(f"no metric '{metric}'{meant}") from None
    better = {"higher": "higher is better", "lower": "lower is better", "none": "neither is better"}
    rows = (("formula", entry.formula), ("source", entry.source))
    details = "\n".join(_labelled(label, text) for label, text in rows)
    head = f"{entry.name}  [{entry.unit}, {better[entry.direction]}]"
    return f"{head}\n\n{textwrap.fill(entry.about, WIDTH)}\n\n{details}"


def _labelled(label: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:9}", subsequent_indent=" " * 9)
