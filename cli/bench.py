"""``schedbench doctor`` and ``bench``: what this machine can run, and what schedbench itself costs on it."""

from __future__ import annotations

import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import Engine, EngineOptions, EnginePython, EngineTimeout, EngineWheels, UndrawnForm
from .errors import GATE_FAILED, UNABLE, UsageError
from .text import echo

if TYPE_CHECKING:
    from ..profiles.bench.bench import BenchFigure
    from .page import Page

_PIP = " -m pip install "


def doctor(
    engine: Engine = None,
    engine_python: EnginePython = None,
    engine_wheels: EngineWheels = None,
    engine_timeout: EngineTimeout = None,
    form: UndrawnForm = "table",
) -> None:
    """Check what this machine can run, or whether it can run an engine of another project; exit code 3 if it can run
    nothing."""
    from ..profiles.lab.doctor import engine_checks, run_checks
    from .page import show_entries

    [other] = EngineOptions(engine_python, engine_wheels, engine_timeout).chosen(engine)
    checks = run_checks() if other is None else engine_checks(other)
    indent = 6 + max(len(check.name) for check in checks)
    lines = [
        _wrapped(f"{'ok' if check.ok else '–':4}{check.name}".ljust(indent), check.detail) for check in checks
    ]
    show_entries(form, "this machine", [check._asdict() for check in checks], "\n".join(lines))
    if not any(check.ok for check in checks if check.runs):
        raise typer.Exit(UNABLE)


def _wrapped(label: str, text: str) -> str:
    """The text beside its label, as wide as tables are. A command of pip at its end is a line of its own, which can be
    copied."""
    from .console import results

    why, pip, packages = text.partition(_PIP)
    before, _, python = why.rpartition(": ") if pip else (text, "", "")
    filled = textwrap.fill(
        f"{before}:" if pip else before,
        results().width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{filled}\n{python}{pip}{packages}" if pip else filled


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
    form: UndrawnForm = "table",
) -> None:
    """Measure the processor time of schedbench itself: its start, steps, whole runs, and parts of a step."""
    from ..profiles.bench.bench import ROUNDS, conclusion, measured

    if gate and (against is None or rounds < ROUNDS):
        raise UsageError(f"--gate needs --against REF, and --rounds of {ROUNDS} or more to see the noise")
    from ..profiles.judge.worker import here, worktree
    from ..profiles.record.result import canonical
    from .page import show

    rows = []
    with nullcontext() if against is None else worktree(here(), against) as tree:
        for row in measured(trace, rounds, tree, only):
            rows.append(row)
            echo(f"{row.name}: {row.value:.4g} {row.unit} {_ratio(row)}".rstrip(), err=True)
    document = {"conclusion": conclusion(rows), "figures": [row.document() for row in rows]}
    show(form, lambda _: _page(rows, conclusion(rows), against), json=lambda: canonical(document))
    raise typer.Exit(GATE_FAILED if gate and any(row.worse for row in rows) else 0)


def _page(rows: list[BenchFigure], said: str, against: str | None) -> Page:
    from .page import Page, framed
    from .text import MISSING, number

    ratio = [] if against is None else [f">ratio to {against}"]
    table = framed(
        "cost of schedbench itself on this machine", "figure", ">value", "unit", ">aim", "", *ratio
    )
    for row in rows:
        aim = MISSING if row.aim is None else f"≤ {number(row.aim)}"
        verdict = {None: "", True: "met", False: "missed"}[row.met]
        table.add_row(row.name, number(row.value), row.unit, aim, verdict, *([_ratio(row)] if ratio else []))
    return Page("bench", [table], said)


def _ratio(row: BenchFigure) -> str:
    """The median of the rounds with the lowest and the highest."""
    from statistics import median

    ratios = row.ratios
    return f"{median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]" if ratios else ""
