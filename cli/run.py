"""``schedbench run``: run one scenario and print its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import arguments
from .errors import GATE_FAILED, INTERRUPTED, WORKLOAD_FAILED, UsageError
from .worth import with_worth

if TYPE_CHECKING:
    from ..profiles.platform.engine_choice import EngineChoice
    from ..profiles.platform.resolve import Resolved
    from ..profiles.ranks.execute import Options
    from ..profiles.record.result import Result
    from .answers import LadderAnswer, RunAnswer

SaveTokens = Annotated[bool, typer.Option("--save-tokens", help="Keep every request's tokens in the result.")]
Hazards = Annotated[
    arguments.Switch,
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
    *,
    overrides: arguments.Overrides = (),
    device: arguments.Device = "auto",
    relay: arguments.Relay = None,
    faults: arguments.Faults = (),
    expect: arguments.Budgets = (),
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
    picture: arguments.WantsPicture = False,
    **keys: arguments.Value,
) -> RunAnswer | LadderAnswer:
    """Run one scenario and print what it cost; with engine.relays, once for each of them, as one table.

    Exit codes: 0 done; 1 a budget was broken, one of --expect is of a kind that no step had, or a hazard was
    found that the relay does not declare; 2 usage or scenario; 3 this machine cannot; 4 the workload
    failed; 130 interrupted, or 143 terminated, what there is was kept.
    """
    arguments.use_workers(jobs, executor)
    [other] = arguments.EngineOptions(engine_python, engine_wheels, engine_timeout).chosen(engine)
    given = [*overrides, *arguments.settings(keys)]
    question = arguments.resolved(scenario, given, relay=relay, budgets=expect, faults=faults, engine=other)
    _require_world(question, world)
    options = _options(device, hazards in ("on", True), adversarial, world, save_tokens=save_tokens)
    _require_further_runs(question, options, ranges=ranges, worth=worth)
    arguments.make_output_dir(output_dir)
    if len(question.relays) > 1:
        return _climb(question, options, worth=worth).kept(output_dir)
    from ..profiles.ranks.execute import execute
    from .answers import RunAnswer
    from .console import run_progress
    from .pictures import drawn, timelines

    with timelines(output_dir, wanted=picture) as folder:
        recorded = replace(options, record=folder)
        result = execute(question, recorded, observe=run_progress)
        drawing = drawn(result, folder) if picture else ()
    if ranges:
        result = _with_ranges(question, result)
    if worth:
        result = with_worth(question, result)
    return RunAnswer(
        result,
        picture=drawing,
        remarks=[*_printed(other), *_remarks(result)],
        exit_code=exit_code(result, [*map(arguments.budget_kind, expect)]),
    ).kept(output_dir)


def _require_further_runs(question: Resolved, options: Options, *, ranges: bool, worth: bool) -> None:
    """Raises UsageError or WorthError where the runs of ``--ranges`` or ``--worth`` are not possible."""
    if ranges:
        from ..profiles.judge.local import refusal

        if reason := refusal(question, options):
            raise UsageError(f"--ranges: {reason}")
    if worth:
        from ..profiles.worth.worth import require_changeable

        for one in question.relays:
            require_changeable(question.with_relay(one), options)


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
    device: arguments.Device, hazards: bool, adversary: int | None, world: World, *, save_tokens: bool
) -> Options:
    if hazards and adversary is not None:
        raise UsageError("--hazards follows values in program order: leave out --adversarial, or use check")
    from ..profiles.ranks.execute import Options

    return Options(
        device=device,
        save_tokens=save_tokens,
        command=arguments.command_line(),
        hazards=hazards,
        adversary=adversary,
        world=world,
        repeated=True,
    )


def _with_ranges(question: Resolved, result: Result) -> Result:
    """The result with its ranges, if it is whole; ``run.further_cancelled`` where the user interrupted the draws."""
    if result.run.cancelled or result.run.failure:
        return result
    from ..profiles.judge.local import ranges
    from .console import status

    try:
        with status("again under draws of the hardware's constants"):
            return result.model_copy(update={"ranges": ranges(question, result)})
    except KeyboardInterrupt:
        return result.model_copy(update={"run": result.run.model_copy(update={"further_cancelled": True})})


def _climb(question: Resolved, options: Options, *, worth: bool) -> LadderAnswer:
    """Run every relay of the scenario. The answer has the worst of their exit codes."""
    from ..profiles.platform.inputs import scenario_part
    from ..profiles.sweeps.ladder import climb, document, tokens_agree
    from ..profiles.worth.worth import worth_of_rungs
    from .answers import LadderAnswer
    from .console import run_progress, status

    if arguments.python_call.get():
        raise question.scenario.source.refuse(
            ("engine", "relays"), "an answer has one relay: give it as relay"
        )
    rungs = climb(question, options, observe=run_progress)
    scenario = scenario_part(question)  # before further runs, which may outlast an edit
    codes, lines = [0 if tokens_agree(question, rungs) else GATE_FAILED, *map(exit_code, rungs)], []
    if worth and INTERRUPTED not in codes:
        try:
            with status("counterfactual runs") as notice:
                lines = worth_of_rungs(question, rungs, notice)
        except KeyboardInterrupt:
            codes.append(INTERRUPTED)
    return LadderAnswer(document(question, scenario, rungs, lines), exit_code=max(codes))


def _printed(engine: EngineChoice | None) -> Iterator[str]:
    """What the engine printed in the run."""
    if engine is None:
        return
    from ..profiles.engines.client import opened_engine

    if text := opened_engine(engine).output.printed():
        yield f"{engine.name} printed:\n{text}"


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


def exit_code(result: Result, expected: Collection[str] = ()) -> int:
    """``expected``: kinds of steps that have to occur, since a budget of them was given."""
    from ..profiles.measure.budget import asked, breaches, untested

    if result.run.cancelled or result.run.further_cancelled:
        return INTERRUPTED
    statuses = {row.status for row in result.requests}
    finished_nothing = bool(statuses) and statuses.isdisjoint(("finished", "aborted"))
    if result.run.failure or finished_nothing or "failed" in statuses:
        return WORKLOAD_FAILED
    budget = asked(result).budget
    missing = {*expected} & {*untested(budget, result)}
    return GATE_FAILED if missing or result.undeclared or breaches(budget, result) else 0
