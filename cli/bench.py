"""``schedbench bench``: the cost of schedbench itself on this machine."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .errors import GATE_FAILED, UsageError
from .text import echo

if TYPE_CHECKING:
    from ..profiles.bench.bench import BenchFigure


def bench(
    trace: Annotated[Path | None, typer.Option(help="A Mooncake trace; its head of 1,500 is run.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="REF", help="Alternate with that commit, and print ratios to it.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side is measured.")] = 1,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only figures whose names contain the text.")
    ] = "",
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit with 1 where a figure is worse by more than its noise.")
    ] = False,
    form: Annotated[Literal["table", "json"], typer.Option("--format")] = "table",
) -> None:
    """Measure the processor time of schedbench itself: its start, steps, whole runs, and parts of a step."""
    if gate and (against is None or rounds < 3):
        raise UsageError("--gate needs --against REF, and --rounds of 3 or more to see the noise")
    from ..profiles.bench.bench import conclusion, measured
    from ..profiles.judge.remote import here, worktree

    rows = []
    with nullcontext() if against is None else worktree(here(), against) as tree:
        for row in measured(trace, rounds, tree, only):
            rows.append(row)
            echo(f"{row.name}: {row.value:.4g} {row.unit} {_ratio(row)}".rstrip(), err=True)
    if form == "json":
        document = {"conclusion": conclusion(rows), "figures": [row.document() for row in rows]}
        echo(json.dumps(document, indent=1))
    else:
        _show(rows, conclusion(rows), against)
    raise typer.Exit(GATE_FAILED if gate and any(row.worse for row in rows) else 0)


def _show(rows: list[BenchFigure], said: str, against: str | None) -> None:
    from .console import results
    from .page import Page, framed, print_page
    from .text import MISSING, number

    ratio = [] if against is None else [f">ratio to {against}"]
    table = framed(
        "cost of schedbench itself on this machine", "figure", ">value", "unit", ">aim", "", *ratio
    )
    for row in rows:
        aim = MISSING if row.aim is None else f"≤ {number(row.aim)}"
        verdict = {None: "", True: "met", False: "missed"}[row.met]
        table.add_row(row.name, number(row.value), row.unit, aim, verdict, *([_ratio(row)] if ratio else []))
    print_page(Page("bench", [table], said), results())


def _ratio(row: BenchFigure) -> str:
    """The median of the rounds with the lowest and the highest."""
    from statistics import median

    ratios = row.ratios
    return f"{median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]" if ratios else ""
