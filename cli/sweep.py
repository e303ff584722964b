"""``schedbench sweep``: run a grid of scenarios, and print where one side stops being the better one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments
from .errors import INTERRUPTED, WORKLOAD_FAILED, UsageError

if TYPE_CHECKING:
    from ..profiles.sweeps.break_even import DrawnCrossings
    from ..profiles.sweeps.runs import Runs
    from ..profiles.sweeps.sweep import Cell, SweepPlan
    from .answers import SweepAnswer

_SIDE = "key=value,..."
A = Annotated[
    str | None, typer.Option("--a", metavar=_SIDE, help="The baseline; overlap=false without --a and --b.")
]
B = Annotated[str | None, typer.Option("--b", metavar=_SIDE, help="The candidate; overlap=true.")]


def sweep(
    scenario: arguments.Name,
    *,
    over: Annotated[
        arguments.Texts,
        typer.Option(
            metavar="KEY=V1,V2",
            help="An axis, also of engines. The first runs across; its sign changes are reported.",
        ),
    ],
    a: A = None,
    b: B = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="The metric itself instead of a comparison; one run per cell.")
    ] = False,
    metric: Annotated[str, typer.Option(help="throughput, ttft.p99, ...")] = "output_throughput",
    overrides: arguments.Overrides = (),
    device: arguments.Device = "auto",
    draws: arguments.Draws = 16,
    quick: arguments.Quick = False,
    engine: arguments.SideEngine = None,  # noqa: ARG001
    engine_python: arguments.EnginePython = None,
    engine_wheels: arguments.EngineWheels = None,
    engine_timeout: arguments.EngineTimeout = None,
    output_dir: Annotated[Path | None, typer.Option(help="Keep sweep.json and every result here.")] = None,
    jobs: arguments.Jobs = None,
    executor: arguments.ExecutorName = None,
    resume: Annotated[bool, typer.Option("--resume", help="Reuse results in --output-dir.")] = False,
    **keys: arguments.Value,
) -> SweepAnswer:
    """Run a scenario over values of some keys and print where the candidate turns from better to worse.

    Exit codes: 0 done; 2 usage, no cell runs; 3 this machine cannot; 4 a cell or draw failed; 130 or 143 interrupted.
    """
    from ..profiles.platform.names import refuse_mistyped

    given, scenario = [*overrides, *arguments.settings(keys)], str(scenario)
    refuse_mistyped(scenario, given)
    _require_usable(output_dir, resume=resume, alone=alone, sided=(a, b) != (None, None))
    from ..profiles.sweeps.sweep import planned

    arguments.use_workers(jobs, executor)
    engines = arguments.EngineOptions(engine_python, engine_wheels, engine_timeout)
    with arguments.typed_as("--over", [axis.partition("=")[0].strip() for axis in over]):
        sides = _sides(a, b, over, alone=alone)
        plan = planned(scenario, over, sides=sides, overrides=given, metric=metric, choose=engines.choice)
    engines.require_used(plan.engines)
    from ..profiles.ranks.execute import Options
    from ..profiles.sweeps.break_even import document
    from ..profiles.sweeps.runs import Runs
    from .answers import SweepAnswer

    options = Options(device=device, command=arguments.command_line(), repeated=True)
    runs = Runs(options, folder=output_dir and output_dir / "runs", resume=resume)
    clock = arguments.Stopwatch()
    found, drawn, cancelled = _swept(plan, runs, 0 if quick else draws)
    content = document(plan, found, drawn, run=clock.run(cancelled=cancelled))
    failed = drawn.failed or any(cell.failed for cell in found)
    code = INTERRUPTED if cancelled else WORKLOAD_FAILED if failed else 0
    return SweepAnswer(content, exit_code=code).kept(output_dir)


def _require_usable(output_dir: Path | None, *, resume: bool, alone: bool, sided: bool) -> None:
    """Raises UsageError for options that exclude each other, and for a folder that cannot be written."""
    if resume and output_dir is None:
        raise UsageError("--resume needs the --output-dir of an earlier sweep")
    if alone and sided:
        raise UsageError("--alone has no sides: leave out --a and --b")
    arguments.make_output_dir(output_dir)


def _sides(a: str | None, b: str | None, over: Sequence[str], *, alone: bool) -> tuple[str, ...]:
    from ..profiles.sweeps.sweep import OVERLAP_PAYS, has_own_sides

    if a is None and b is None:
        return () if alone or has_own_sides(over) else OVERLAP_PAYS
    return a or "", b or ""


def _swept(plan: SweepPlan, runs: Runs, draws: int) -> tuple[list[Cell], DrawnCrossings, bool]:
    """The cells, their break-evens under draws of the hardware's constants, and whether the user interrupted them.
    Where no cell has a value, raises SweepError; WorkloadError where one failed, MachineError where this machine cannot
    run one; EngineError where the reason is a source that is not there."""
    from ..profiles.engines.client import opened_engine
    from ..profiles.engines.names import EngineError
    from ..profiles.judge.sides import ENGINE
    from ..profiles.judge.trials import WorkloadError
    from ..profiles.platform.machine import MachineError
    from ..profiles.sweeps.break_even import DrawnCrossings, ask_again
    from ..profiles.sweeps.runs import Unable
    from ..profiles.sweeps.sweep import SweepError, cells
    from .console import status

    found: list[Cell] = []
    try:
        with status("starting", imports=any(axis.key == ENGINE for axis in plan.axes)) as update:
            found.extend(cells(plan, runs, update))
            if not any(cell.values for cell in found):
                reasons = "\n".join(dict.fromkeys(f"no cell could run: {cell.refusal}" for cell in found))
                unable = any(isinstance(cell.refusal, Unable) for cell in found)
                failed = any(cell.failed for cell in found)
                with suppress(EngineError):
                    for name in plan.engines:
                        opened_engine(plan.choose(name))
                    raise (WorkloadError if failed else MachineError if unable else SweepError)(reasons)
                raise EngineError(reasons)
            if draws:
                update("the break-evens under draws of the hardware's constants")
            return found, ask_again(plan, found, draws), False
    except KeyboardInterrupt:
        return found, DrawnCrossings({}, "interrupted"), True
