"""``schedbench bench``: the cost of schedbench itself on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .text import echo

if TYPE_CHECKING:
    from ..profiles.bench.bench import BenchFigure


def bench(
    trace: Annotated[Path | None, typer.Option(help="A Mooncake trace; its head of 1,500 is run.")] = None,
    form: Annotated[Literal["table", "json"], typer.Option("--format")] = "table",
) -> None:
    """Time schedbench itself: its start, an emulated op, a scheduler step, whole runs."""
    from ..profiles.bench.bench import conclusion, stages

    rows = []
    for stage in stages(trace):
        for row in stage():
            rows.append(row)
            echo(f"{row.name}: {row.value:.4g} {row.unit}", err=True)
    if form == "json":
        figures = [row._asdict() for row in rows]
        echo(json.dumps({"conclusion": conclusion(rows), "figures": figures}, indent=1))
    else:
        _show(rows, conclusion(rows))


def _show(rows: list[BenchFigure], said: str) -> None:
    from .console import results
    from .page import Page, framed, print_page
    from .text import MISSING, number

    table = framed("cost of schedbench itself on this machine", "figure", ">value", ">aim", "unit", "")
    for row in rows:
        aim = MISSING if row.aim is None else f"{'≤' if row.lower else '≥'} {number(row.aim)}"
        verdict = {None: "", True: "met", False: "missed"}[row.met]
        table.add_row(row.name, number(row.value), aim, row.unit, verdict)
    print_page(Page("bench", [table], said), results())
