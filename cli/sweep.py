"""``schedbench sweep``: run a grid of scenarios, and print where one side stops being the better one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import INTERRUPTED, UsageError
from .scenario_arguments import (
    Device,
    Draws,
    EnginePython,
    EngineWheels,
    EveryTable,
    ExecutorName,
    Form,
    Format,
    Jobs,
    Name,
    chosen_engine,
    use_workers,
)
from .stopwatch import Stopwatch, command_line

if TYPE_CHECKING:
    from ..profiles.sweeps.break_even import DrawnCrossings
    from ..profiles.sweeps.runs import Runs
    from ..profiles.sweeps.sweep import Cell, SweepPlan

_SIDE = "key=value,..."


def sweep(
    scenario: Name,
    over: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=V1,V2",
            help="An axis, also of engines. The first runs across; its sign changes are reported.",
        ),
    ],
    a: Annotated[
        str | None,
        typer.Option("--a", metavar=_SIDE, help="The baseline; overlap=false without --a and --b."),
    ] = None,
    b: Annotated[str | None, typer.Option("--b", metavar=_SIDE, help="The candidate; overlap=true.")] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="The metric itself instead of a comparison; one run per cell.")
    ] = False,
    metric: Annotated[str, typer.Option(help="throughput, ttft.p99, ...")] = "output_throughput",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key in every cell.")
    ] = None,
    device: Device = "auto",
    draws: Draws = 16,
    engine_python: EnginePython = None,
    engine_wheels: EngineWheels = None,
    output_dir: Annotated[Path | None, typer.Option(help="Keep sweep.json and every result here.")] = None,
    jobs: Jobs = None,
    executor: ExecutorName = None,
    resume: Annotated[bool, typer.Option("--resume", help="Reuse results in --output-dir.")] = False,
    every_table: EveryTable = False,
    form: Form = "table",
) -> None:
    """Run a scenario over values of some keys and print where the candidate turns from better to worse.

    Exit codes: 0 done; 2 usage, or no cell could run; 3 this machine cannot; 130 interrupted, or 143 terminated,
    what there is was kept.
    """
    from ..scenarios.loader import refuse_mistyped

    refuse_mistyped(scenario, overrides or ())
    _require_usable(resume=resume, kept=output_dir is not None, alone=alone, sided=(a, b) != (None, None))
    from ..profiles.ranks.execute import Options
    from ..profiles.sweeps.document import document
    from ..profiles.sweeps.runs import Runs
    from ..profiles.sweeps.sweep import has_own_sides, planned

    use_workers(jobs, executor)
    sides = _sides(a, b, alone=alone or (a is None and b is None and has_own_sides(over)))
    choose = partial(chosen_engine, python=engine_python, wheels=engine_wheels)
    plan = planned(scenario, over, sides=sides, overrides=overrides or (), metric=metric, choose=choose)
    folder = None if output_dir is None else output_dir / "runs"
    runs = Runs(Options(device=device, command=command_line()), folder=folder, resume=resume)
    clock = Stopwatch()
    found, cancelled = _found(plan, runs)
    drawn, stopped = _drawn(plan, found, 0 if cancelled else draws)
    cancelled = cancelled or stopped
    run = clock.run(cancelled=cancelled)
    content = _kept(document(plan, found, drawn, run=run), output_dir)
    _show(content, form, every_table=every_table)
    raise typer.Exit(INTERRUPTED if cancelled else 0)


def _require_usable(*, resume: bool, kept: bool, alone: bool, sided: bool) -> None:
    """Raises UsageError for options that exclude each other."""
    if resume and not kept:
        raise UsageError("--resume needs the --output-dir of an earlier sweep")
    if alone and sided:
        raise UsageError("--alone has no sides: leave out --a and --b")


def _sides(a: str | None, b: str | None, *, alone: bool) -> tuple[str, ...]:
    from ..profiles.sweeps.sweep import OVERLAP_PAYS

    if alone:
        return ()
    return OVERLAP_PAYS if a is None and b is None else (a or "", b or "")


def _found(plan: SweepPlan, runs: Runs) -> tuple[list[Cell], bool]:
    """The cells, and whether the user interrupted the sweep."""
    from ..profiles.sweeps.sweep import SweepError, cells
    from .console import status

    found: list[Cell] = []
    try:
        with status("starting") as update:
            found.extend(cells(plan, runs, update))
    except KeyboardInterrupt:
        return found, True
    if not any(cell.values for cell in found):
        raise SweepError(f"no cell could run: {found[0].refusal}")
    return found, False


def _drawn(plan: SweepPlan, found: list[Cell], draws: int) -> tuple[DrawnCrossings, bool]:
    """The break-evens under draws of the hardware's constants, and whether the user interrupted them."""
    from ..profiles.sweeps.break_even import DrawnCrossings, ask_again
    from .console import status

    try:
        with status("the break-evens under draws of the hardware's constants"):
            return ask_again(plan, found, draws), False
    except KeyboardInterrupt:
        return DrawnCrossings({}, "interrupted"), True


def _kept(content: dict[str, Any], output_dir: Path | None) -> dict[str, Any]:
    from ..profiles.record.files import write_whole
    from ..profiles.record.result import canonical

    if output_dir is not None:
        write_whole(output_dir / "sweep.json", canonical(content))
    return content


def _show(content: dict[str, Any], form: Format, *, every_table: bool) -> None:
    from ..profiles.record.result import canonical
    from . import sweep_page
    from .page import show

    most = sweep_page.FEW if form == "table" and not every_table else None
    show(
        form,
        lambda _: sweep_page.page(content, most=most),
        json=lambda: canonical(content),
        csv=lambda: sweep_page.as_csv(content),
        every_table=every_table,
    )
