"""``schedbench worth``: what each line that copies, waits or launches costs, by runs in which it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments
from .errors import UsageError

if TYPE_CHECKING:
    from ..profiles.platform.resolve import Resolved
    from ..profiles.ranks.execute import Options
    from ..profiles.record.result import Result
    from ..profiles.worth.worth import Notice

ROOMS = 8  # hidden lines and phases whose room is searched for; each takes about four runs


def worth(
    scenario: arguments.Name,
    overrides: arguments.Overrides = None,
    relay: arguments.Relay = None,
    fault: arguments.Faults = None,
    rooms: Annotated[
        int,
        typer.Option(min=0, help="Of so many hidden lines and phases, find how much longer they could take."),
    ] = ROOMS,
    quick: Annotated[bool, typer.Option("--quick", help="Ask no room: --rooms 0.")] = False,
    jobs: arguments.Jobs = None,
    executor: arguments.ExecutorName = None,
    output_dir: Annotated[Path | None, typer.Option(help="Keep result.json here.")] = None,
    every_line: Annotated[bool, typer.Option("--all", help="Show every hidden line, not only some.")] = False,
    form: arguments.Form = "table",
) -> None:
    """Run a scenario on the virtual GPU again and again, each time with one line's waits, copies or launches changed or
    with half of a host phase, and print what that gains.

    Exit codes: those of run. 130 interrupted: the lines that were asked are kept.
    """
    arguments.use_workers(jobs, executor)
    question = arguments.resolved(scenario, overrides, relay=relay, faults=fault)
    from ..profiles.ranks.execute import Options
    from .console import status
    from .page import show
    from .result_page import csv_of, worth_page_of
    from .run import executed, exit_code

    options = Options(device="vgpu", command=arguments.command_line())
    require_worth(question, options)
    arguments.make_output_dir(output_dir)
    outcome = executed(question, options, None, form)
    with status("counterfactual runs") as notice:
        outcome = replace(
            outcome, result=with_worth(question, outcome.result, notice, rooms=0 if quick else rooms)
        )
    document, few = outcome.result.document(), form == "table" and not every_line
    show(
        form,
        lambda _: worth_page_of(document, few=few),
        json=outcome.result.to_json,
        csv=lambda: csv_of([document], only="worth."),
        every_table=every_line,
    )
    if output_dir is not None:
        outcome.result.write(output_dir / "result.json")
    raise typer.Exit(exit_code(outcome))


def require_worth(question: Resolved, options: Options) -> None:
    """Raises UsageError where counterfactual runs would not be the same run but for one thing."""
    from ..profiles.worth.worth import refusal

    if reason := refusal(question, options):
        raise UsageError(f"worth: {reason}")


def with_worth(question: Resolved, result: Result, notice: Notice, *, rooms: int = ROOMS) -> Result:
    """The result with what its lines are worth, if it is whole; marked as cancelled where the user interrupted that."""
    if result.run.cancelled or result.run.failure:
        return result
    from ..profiles.worth.worth import worth

    part, interrupted = worth(question, result, notice, rooms=rooms)
    run = result.run.model_copy(update={"cancelled": True}) if interrupted else result.run
    return result.model_copy(update={"worth": part, "run": run})
