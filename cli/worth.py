"""``schedbench worth``: what each line that copies, waits or launches costs, by runs in which it does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments

if TYPE_CHECKING:
    from ..profiles.platform.resolve import Resolved
    from ..profiles.record.result import Result
    from .answers import WorthAnswer

ROOMS = 8  # hidden lines and phases whose room is searched for; each takes about four runs


def worth(
    scenario: arguments.Name,
    *,
    overrides: arguments.Overrides = (),
    relay: arguments.Relay = None,
    faults: arguments.Faults = (),
    rooms: Annotated[
        int,
        typer.Option(min=0, help="Of so many hidden lines and phases, find how much longer they could take."),
    ] = ROOMS,
    quick: Annotated[bool, typer.Option("--quick", help="Ask no room: --rooms 0.")] = False,
    jobs: arguments.Jobs = None,
    executor: arguments.ExecutorName = None,
    engine: arguments.Engine = None,
    engine_python: arguments.EnginePython = None,
    engine_wheels: arguments.EngineWheels = None,
    engine_timeout: arguments.EngineTimeout = None,
    output_dir: Annotated[Path | None, typer.Option(help="Keep result.json here.")] = None,
    **keys: arguments.Value,
) -> WorthAnswer:
    """Run a scenario on the virtual GPU again and again, each time with one line's waits, copies or launches changed or
    with half of a host phase, and print what that gains.

    Exit codes: those of run. 130 interrupted, or 143 terminated: the lines that were asked are kept.
    """
    arguments.use_workers(jobs, executor)
    [other] = arguments.EngineOptions(engine_python, engine_wheels, engine_timeout).chosen(engine)
    given = [*overrides, *arguments.settings(keys)]
    question = arguments.resolved(scenario, given, relay=relay, faults=faults, engine=other)
    from ..profiles.ranks.execute import Options, execute
    from ..profiles.worth.worth import require_changeable
    from .answers import WorthAnswer
    from .console import run_progress
    from .run import exit_code

    options = Options(device="vgpu", command=arguments.command_line())
    require_changeable(question, options)
    arguments.make_output_dir(output_dir)
    result = execute(question, options, observe=run_progress)
    result = with_worth(question, result, rooms=0 if quick else rooms)
    return WorthAnswer(result, exit_code=exit_code(result)).kept(output_dir)


def with_worth(question: Resolved, result: Result, *, rooms: int = ROOMS) -> Result:
    from ..profiles.worth.worth import worth
    from .console import status

    with status("counterfactual runs") as notice:
        return worth(question, result, notice, rooms=rooms)
