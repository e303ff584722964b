"""``schedbench sweep``: a grid of runs, and where one side stops being the better one. Knows no measuring."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .errors import INTERRUPTED, UsageError
from .stopwatch import Stopwatch, command_line

if TYPE_CHECKING:
    from ..profiles.sweeps.sweep import Cell, Runs, SweepPlan

Format = Literal["table", "json", "md", "csv"]
_SIDE = "key=value,..."


def sweep(
    scenario: Annotated[str, typer.Argument(help="A scenario file, or the name of a shipped one.")],
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=V1,V2", help="An axis; the first runs across, its sign changes are told."),
    ],
    a: Annotated[
        str | None,
        typer.Option("--a", metavar=_SIDE, help="The baseline; overlap=false without --a and --b."),
    ] = None,
    b: Annotated[str | None, typer.Option("--b", metavar=_SIDE, help="The candidate; overlap=true.")] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="No sides: the metric itself, one run per cell.")
    ] = False,
    metric: Annotated[str, typer.Option(help="throughput, ttft.p99, ...")] = "output_throughput",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key in every cell.")
    ] = None,
    device: Annotated[
        Literal["auto", "cuda", "vgpu"], typer.Option(help="auto takes CUDA where there is one.")
    ] = "auto",
    output_dir: Annotated[Path | None, typer.Option(help="Keep sweep.json and every result here.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Reuse results in --output-dir.")] = False,
    form: Annotated[Format, typer.Option("--format", help="What to print on stdout.")] = "table",
) -> None:
    """Run a scenario over values of some keys and print where the candidate turns from better to worse.

    Exit codes: 0 done; 2 usage, or no cell could run; 3 this machine cannot; 130 interrupted, or 143 terminated,
    what there is was kept.
    """
    from ..profiles.ranks.execute import Options
    from ..profiles.sweeps.sweep import Runs, planned, varies_overlap

    if resume and output_dir is None:
        raise UsageError("--resume needs the --output-dir of an earlier sweep")
    if alone and (a is not None or b is not None):
        raise UsageError("--alone has no sides: leave out --a and --b")
    sides = _sides(a, b, alone=alone or (a is None and b is None and varies_overlap(over)))
    plan = planned(scenario, over, sides=sides, overrides=overrides or (), metric=metric)
    folder = None if output_dir is None else output_dir / "runs"
    runs = Runs(Options(device=device, command=command_line()), folder=folder, resume=resume)
    clock = Stopwatch()
    found, cancelled = _found(plan, runs)
    run = clock.run(cancelled=cancelled)
    _show(plan, found, run=run, output_dir=output_dir, form=form)
    raise typer.Exit(INTERRUPTED if cancelled else 0)


def _sides(a: str | None, b: str | None, *, alone: bool) -> tuple[str, ...]:
    from ..profiles.sweeps.sweep import OVERLAP_PAYS

    if alone:
        return ()
    return OVERLAP_PAYS if a is None and b is None else (a or "", b or "")


def _found(plan: SweepPlan, runs: Runs) -> tuple[list[Cell], bool]:
    """The cells, and whether the user stopped before the last."""
    from ..profiles.sweeps.sweep import SweepError, cells
    from .console import progress

    found: list[Cell] = []
    try:
        with progress().status("starting") as status:
            found.extend(cells(plan, runs, status.update))
    except KeyboardInterrupt:
        return found, True
    if not any(cell.readings for cell in found):
        raise SweepError(f"no cell could run: {found[0].refusal}")
    return found, False


def _show(
    plan: SweepPlan, found: list[Cell], *, run: dict[str, Any], output_dir: Path | None, form: Format
) -> None:
    from ..profiles.record.files import write_whole
    from ..profiles.record.result import canonical
    from ..profiles.sweeps.document import document
    from . import grid
    from .console import results

    content = document(plan, found, run=run)
    if output_dir is not None:
        write_whole(output_dir / "sweep.json", canonical(content))
    if form == "table":
        grid.render(content, results())
    else:
        sys.stdout.write(canonical(content) if form == "json" else grid.TEXTS[form](content))
