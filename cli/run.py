"""``schedbench run``: run one scenario and print its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import arguments
from .errors import GATE_FAILED, INTERRUPTED, WORKLOAD_FAILED, UsageError, ends_interrupted
from .text import echo
from .worth import require_worth, with_worth

if TYPE_CHECKING:
    from ..profiles.measure.budget import RunOutcome
    from ..profiles.platform.engine_choice import EngineChoice
    from ..profiles.platform.resolve import Resolved
    from ..profiles.ranks.execute import Options
    from ..profiles.record.result import Result
    from ..sched.observe import Clock
    from .console import RunProgress
    from .page import Drawn

SaveTokens = Annotated[bool, typer.Option("--save-tokens", help="Keep every request's tokens in the result.")]
Hazards = Annotated[
    Literal["on", "off"],
    typer.Option(help="Watch for unordered accesses to memory; on CUDA instead of measuring."),
]
Adversarial = Annotated[
    int | None, typer.Option(metavar="SEED", min=0, help="Do all work as late as streams allow; see check.")
]
World = Annotated[
    Literal["virtual", "distributed"],
    typer.Option(help="Of several ranks: threads of this process, or processes of torch.distributed."),
]
Ranges = Annotated[
    bool,
    typer.Option("--ranges", help="Run again under draws of the hardware's constants from their ranges."),
]
Worth = Annotated[
    bool,
    typer.Option("--worth", help="Run again with each line's waits, copies or launches changed; see worth."),
]
OutputDir = Annotated[Path | None, typer.Option(help="Keep result.json here, and the timeline for trace.")]


def run(
    scenario: arguments.Name,
    overrides: arguments.Overrides = None,
    device: arguments.Device = "auto",
    relay: arguments.Relay = None,
    fault: arguments.Faults = None,
    expect: arguments.Budgets = None,
    save_tokens: SaveTokens = False,
    hazards: Hazards = "off",
    adversarial: Adversarial = None,
    world: World = "virtual",
    ranges: Ranges = False,
    worth: Worth = False,
    jobs: arguments.Jobs = None,
    executor: arguments.ExecutorName = None,
    engine: arguments.Engine = None,
    engine_python: arguments.EnginePython = None,
    engine_wheels: arguments.EngineWheels = None,
    engine_timeout: arguments.EngineTimeout = None,
    output_dir: OutputDir = None,
    every_table: arguments.EveryTable = False,
    picture: arguments.WantsPicture = False,
    form: arguments.Form = "table",
) -> None:
    """Run one scenario and print what it cost; with engine.relays, once for each of them, as one table.

    Exit codes: 0 done; 1 a budget was broken, one of --expect is of a kind that no step had, or a hazard was
    found that the relay does not declare; 2 usage or scenario; 3 this machine cannot; 4 the workload
    failed; 130 interrupted, or 143 terminated, what there is was kept.
    """
    arguments.use_workers(jobs, executor)
    engines = arguments.EngineOptions(engine_python, engine_wheels, engine_timeout)
    other = arguments.engine_choice(engine, engines)
    question = arguments.resolved(
        scenario, overrides, relay=relay, budgets=expect, faults=fault, engine=other
    )
    _require_world(question, world)
    options = _options(device, hazards, adversarial, world, save_tokens=save_tokens)
    _require_further_runs(question, options, ranges=ranges, worth=worth)
    arguments.make_output_dir(output_dir)
    from .console import status
    from .pictures import drawn, timelines

    wanted = arguments.wants_picture(form, picture)
    with timelines(output_dir, wanted=wanted) as folder:
        outcome = executed(question, options, folder, form, every_table=every_table, worth=worth)
        drawing = drawn(outcome.result, folder) if wanted else ()
    if other is not None:
        _show_printed(other)
    if ranges:
        outcome = replace(outcome, result=_with_ranges(question, outcome.result))
    if worth:
        with status("counterfactual runs") as notice:
            outcome = replace(outcome, result=with_worth(question, outcome.result, notice))
    _show(outcome, output_dir, form, every_table=every_table, picture=drawing)
    unasked = {arguments.budget_kind(budget) for budget in expect or ()} & {*outcome.untested}
    raise typer.Exit(exit_code(outcome) or (GATE_FAILED if unasked else 0))


def _require_further_runs(question: Resolved, options: Options, *, ranges: bool, worth: bool) -> None:
    """Raises UsageError where the runs of ``--ranges`` or ``--worth`` are not possible."""
    if ranges:
        from ..profiles.judge.local import refusal

        if reason := refusal(question, options):
            raise UsageError(f"--ranges: {reason}")
    if worth:
        for one in question.relays:
            require_worth(replace(question, relays=(one,)), options)


def executed(
    question: Resolved,
    options: Options,
    output_dir: Path | None,
    form: arguments.Format,
    *,
    every_table: bool = False,
    worth: bool = False,
) -> RunOutcome:
    """The outcome for the only relay. Raises typer.Exit once it has run several, and where it was interrupted."""
    from ..profiles.ranks.execute import execute

    with ends_interrupted("interrupted before anything was measured"):
        if len(question.relays) > 1:
            raise typer.Exit(
                _climb(question, options, output_dir, form, every_table=every_table, worth=worth)
            )
        options = replace(options, record=output_dir)
        return execute(question, question.relays[0], options, observe=_watch)


def _require_world(question: Resolved, world: World) -> None:
    """Raises UsageError for processes of one rank, and where torchrun started several processes, all of which would run
    the whole scenario."""
    from ..profiles.ranks.torchrun import launched

    if world == "distributed" and question.scenario.engine.ranks == 1:
        raise UsageError(
            "--world: distributed takes several ranks, and the scenario has one: see engine.pipeline, "
            "engine.disaggregation, engine.data_parallel, engine.replicas"
        )
    place = launched() if world == "virtual" else None
    if place is not None and place.size > 1:
        raise UsageError(
            f"--world: this process is one of {place.size} that torchrun started; --world distributed makes them ranks"
        )


def _options(
    device: arguments.Device, hazards: Hazards, adversary: int | None, world: World, *, save_tokens: bool
) -> Options:
    if hazards == "on" and adversary is not None:
        raise UsageError("--hazards follows values in program order: leave out --adversarial, or use check")
    from ..profiles.ranks.execute import Options

    return Options(
        device=device,
        save_tokens=save_tokens,
        command=arguments.command_line(),
        hazards=hazards == "on",
        adversary=adversary,
        world=world,
    )


def _with_ranges(question: Resolved, result: Result) -> Result:
    """The result with its ranges, if it is whole; marked as cancelled where the user interrupted the draws."""
    if result.run.cancelled or result.run.failure:
        return result
    from ..profiles.judge.local import ranges
    from .console import status

    try:
        with status("again under draws of the hardware's constants"):
            return result.model_copy(update={"ranges": ranges(question, result)})
    except KeyboardInterrupt:
        return result.model_copy(update={"run": result.run.model_copy(update={"cancelled": True})})


def _watch(clock: Clock, total: int) -> RunProgress:
    from .console import RunProgress, progress

    return RunProgress(progress(), total=total, clock=clock)


def _climb(
    question: Resolved,
    options: Options,
    output_dir: Path | None,
    form: arguments.Format,
    *,
    every_table: bool,
    worth: bool,
) -> int:
    """Run every relay of the scenario. Returns the worst of their exit codes."""
    from ..profiles.sweeps.ladder import climb
    from ..profiles.worth.worth import climbed_with_worth
    from .answers import LadderAnswer
    from .console import status

    found = climb(question, options, observe=_watch)
    interrupted = False
    if worth:
        try:
            with status("counterfactual runs") as notice:
                found = climbed_with_worth(found, notice)
        except KeyboardInterrupt:
            interrupted = True
    answer = LadderAnswer(found.document())
    answer.keep(output_dir, "ladder.json")
    answer.show(form, every_table=every_table)
    codes = [exit_code(rung.outcome) for rung in found.rungs]
    return INTERRUPTED if interrupted else max(*codes, 0 if found.tokens_agree else GATE_FAILED)


def _show(
    outcome: RunOutcome, output_dir: Path | None, form: arguments.Format, *, every_table: bool, picture: Drawn
) -> None:
    from .answers import RunAnswer

    answer = RunAnswer(outcome)
    answer.show(form, every_table=every_table, picture=picture)
    for line in _remarks(outcome.result):
        echo(line, err=True)
    answer.keep(output_dir, "result.json")


def _show_printed(engine: EngineChoice) -> None:
    """Print on stderr what the engine printed in the run."""
    from ..profiles.engines.client import printed_by

    if text := printed_by(engine):
        echo(f"{engine.name} printed:\n{text}", err=True)


def _remarks(result: Result) -> Iterator[str]:
    """The most frequent reasons for which requests did not finish, the ranks that were lost, and the scripted faults
    that did not occur."""
    reasons = Counter(
        (row.status, row.reason) for row in result.requests if row.status in ("refused", "failed")
    )
    yield from (f"{count} {status}: {reason}" for (status, reason), count in reasons.most_common(3))
    if result.run.failure:
        yield f"broke off: {result.run.failure}"
    yield from (f"did not happen: {fault}" for fault in result.run.missed)


def exit_code(outcome: RunOutcome) -> int:
    result = outcome.result
    if result.run.cancelled:
        return INTERRUPTED
    statuses = {row.status for row in result.requests}
    finished_nothing = bool(statuses) and statuses.isdisjoint(("finished", "aborted"))
    failed_by_script = result.scenario.expanded.get("faults") and "failed" in statuses
    if result.run.failure or finished_nothing or failed_by_script:
        return WORKLOAD_FAILED
    return GATE_FAILED if outcome.breaches or outcome.undeclared else 0
