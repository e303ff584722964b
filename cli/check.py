"""``schedbench check``: check tokens, hazards, invariants and budgets of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import arguments
from .errors import GATE_FAILED, INTERRUPTED, UsageError

if TYPE_CHECKING:
    from ..profiles.check.report import Report
    from ..profiles.platform.engine_choice import EngineChoice
    from ..profiles.platform.resolve import Resolved
    from .answers import CheckAnswer

_Notice = Callable[[str], None]
SEEDS = 4

Device = Annotated[
    Literal["vgpu", "cuda"],
    typer.Option(
        help="cuda: hazards and invariants of a run on the GPU, watched from inside; without adversaries, "
        "since a real device has no delays to choose."
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        min=0,
        help=f"Random adversaries, besides all strategies. [default: {SEEDS}; 0 with --all-faults]",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Without random adversaries: --seeds 0.")]
Adversarial = Annotated[
    int | None, typer.Option("--adversarial", min=0, metavar="SEED", help="This adversary only.")
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="ENGINE",
        help="Another source of the engine, such as the merge base: its findings fail no check here.",
    ),
]
AllFaults = Annotated[
    bool,
    typer.Option(
        "--all-faults", help="Check that every known bug is caught, each in the scenario in which it shows."
    ),
]


def check(
    scenario: arguments.Name = "",
    *,
    overrides: arguments.Overrides = (),
    relay: arguments.Relay = None,
    faults: arguments.Faults = (),
    expect: arguments.Budgets = (),
    device: Device = "vgpu",
    seeds: Seeds = None,
    quick: Quick = False,
    adversarial: Adversarial = None,
    all_faults: AllFaults = False,
    jobs: arguments.Jobs = None,
    executor: arguments.ExecutorName = None,
    engine: arguments.Engine = None,
    engine_python: arguments.EnginePython = None,
    engine_wheels: arguments.EngineWheels = None,
    engine_timeout: arguments.EngineTimeout = None,
    against: Against = None,
    output_dir: Annotated[Path | None, typer.Option(help="Write check.json into this folder.")] = None,
    **keys: arguments.Value,
) -> CheckAnswer:
    """Check that a scenario's tokens are right, that every access is ordered, whatever order the streams allow, that
    invariants hold and budgets are kept. On the virtual GPU unless --device says otherwise; judges no time.

    Exit codes: 0 all checks passed; 1 one failed, or a known bug was not caught; 2 usage or scenario;
    3 this machine cannot; 130 interrupted, or 143 terminated, the checks until then are shown.
    """
    arguments.use_workers(jobs, executor)
    seeds = 0 if quick else seeds
    if device == "cuda":
        _require_cuda(engine, adversaries=(seeds, adversarial) != (None, None))
    given = [*overrides, *arguments.settings(keys)]
    of_one = scenario or given or relay or faults or expect or engine or adversarial is not None
    if not (scenario or all_faults):
        raise UsageError("check needs a scenario, or --all-faults")
    if all_faults and (of_one or device == "cuda"):
        raise UsageError("--all-faults has its scenarios: only --seeds, --format and --output-dir go with it")
    if against is not None and engine is None:
        raise UsageError("--against is about sources of an engine: name one with --engine")
    engines = arguments.EngineOptions(engine_python, engine_wheels, engine_timeout)
    other, base = engines.chosen(engine, against)
    from .answers import CheckAnswer
    from .console import status

    arguments.make_output_dir(output_dir)
    clock = arguments.Stopwatch()
    with status(lines=all_faults) as notice:
        if all_faults:
            content = _all_faults(seeds or 0, clock, notice)
        else:
            question = arguments.resolved(
                scenario, given, relay=relay, budgets=expect, faults=faults, engine=other
            )
            random = SEEDS if seeds is None else seeds
            adversaries = None if device == "cuda" else random if adversarial is None else (adversarial,)
            kinds = {arguments.budget_kind(budget) for budget in expect}
            content = _examined(question, clock, notice, adversaries=adversaries, against=base, budgets=kinds)
    code = INTERRUPTED if content["run"]["cancelled"] else 0 if content["passed"] else GATE_FAILED
    return CheckAnswer(content, exit_code=code).kept(output_dir)


def _require_cuda(engine: str | None, *, adversaries: bool) -> None:
    """Raises UsageError for checks that a real device does not support."""
    if adversaries:
        raise UsageError(
            "--device cuda: adversaries choose when work is done, which a real device does not allow"
        )
    if engine is not None:
        raise UsageError("--device cuda: an engine of another project runs on the virtual GPU")


def _all_faults(seeds: int, clock: arguments.Stopwatch, notice: _Notice) -> dict[str, Any]:
    from ..profiles.platform.pool import prepare_pool

    prepare_pool()  # what its processes are forked from imports beside this one
    from ..profiles.check.adversaries import seeds as numbers
    from ..profiles.check.all_faults import catch_all, faults_document

    return faults_document(catch_all(numbers(seeds), notice), run=clock.run())


def _examined(
    question: Resolved,
    clock: arguments.Stopwatch,
    notice: _Notice,
    *,
    adversaries: int | tuple[int] | None,
    against: EngineChoice | None,
    budgets: Collection[str],
) -> dict[str, Any]:
    """The document of all checks, marked as cancelled where the user interrupted them. ``adversaries``: so many random
    ones beside all strategies, or this one; None: on CUDA, where there are none. ``against``: as for
    ``examine_engine``. ``budgets``: kinds of steps that have to occur, since a budget of them was given. Raises
    KeyboardInterrupt where the user interrupted the checks before the first had ended."""
    from ..profiles.check.adversaries import seeds
    from ..profiles.check.engine import examine_engine
    from ..profiles.check.examine import Examiner, examine_on_cuda, not_asked, require_tested
    from ..profiles.check.report import document
    from ..profiles.platform.inputs import scenario_part

    scenario = scenario_part(question)  # before the runs, which may outlast an edit
    numbers = seeds(adversaries) if isinstance(adversaries, int) else adversaries or ()
    reports: list[Report] = []
    if adversaries is None:
        reports += examine_on_cuda(question, notice)
    elif question.engine is not None:
        reports.append(examine_engine(question, numbers, notice, against=against))
    else:
        examiner = Examiner(question, numbers, notice)
        for relay in question.relays:
            reports.append(examiner.examine(relay))
            if reports[-1].cancelled:
                break
    for report in reports:
        require_tested(report, budgets)
    if all(check.verdict == "not asked" for one in reports for check in one.checks):
        raise KeyboardInterrupt
    left_out = not_asked(question, numbers, reports)
    return document(scenario, reports, not_asked=left_out, run=clock.run(cancelled=reports[-1].cancelled))
