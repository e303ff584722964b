"""``schedbench compare``: compare two sides, and print the verdict and its evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from . import arguments
from .errors import GATE_FAILED, INTERRUPTED, WORKLOAD_FAILED, UsageError, ends_interrupted
from .text import echo

if TYPE_CHECKING:
    from ..profiles.captures.files import Reader
    from ..profiles.judge.compare import VerdictRules
    from ..profiles.judge.sides import SideSpec
    from ..profiles.judge.trials import DrawnRuns, Notice, Question, Sample, TrialPlan, Trials
    from ..scenarios.schema import Case
    from .answers import ComparisonAnswer
    from .page import Drawn

_LIBRARY = "cases"
_Sides = Literal["a", "b"]
_SIDE = (
    "key=value,... or git:REF or another project's engine, such as sglang:FOLDER@REF, "
    "or a stored result.json, a capture, or a folder of either."
)

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SCENARIO | A B]", help="A scenario's file or name; or two stored results or captures."
    ),
]
A = Annotated[str, typer.Option("--a", metavar="SIDE", help=f"The baseline: {_SIDE}")]
B = Annotated[str, typer.Option("--b", metavar="SIDE", help="The candidate, in the same forms.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key on both sides.")
]
Seeds = Annotated[int, typer.Option(min=1, help="Workload seeds where times are emulated: 5 for a verdict.")]
Pairs = Annotated[int, typer.Option(min=1, help="Pairs of interleaved blocks where times are measured.")]
MinEffect = Annotated[
    float, typer.Option(min=0, metavar="PCT", help="Effects smaller than this count as no change.")
]
MinEngagement = Annotated[
    float,
    typer.Option(
        min=0, max=100, metavar="PCT", help="The least share of steps that the change has to affect."
    ),
]
Gates = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        metavar="NAME:BOUND",
        help="How much worse B may be (throughput:2%), how much better it has to be (better:ttft_ms:5%),"
        " a count of its worst step (decode.steady.schedule.h2d:0), or what it adds to every step (added.sync:0).",
    ),
]
Undecided = Annotated[
    Literal["fail", "pass"], typer.Option("--undecided", help="What a gate that cannot be decided does.")
]
AllowDivergence = Annotated[
    bool, typer.Option("--allow-divergence", help="Judge performance although the tokens differ.")
]
ExitOnInconclusive = Annotated[
    bool, typer.Option("--exit-on-inconclusive", help="Exit with 1 where there is no verdict.")
]
Worth = Annotated[
    bool,
    typer.Option(
        "--worth", help="Run again without each source line that differs, to find what it accounts for."
    ),
]
OutputDir = Annotated[Path | None, typer.Option(help="Keep compare.json and every run's result here.")]


class ComparisonOptions(NamedTuple):
    """The options that hold for every comparison. The first seed, the varied keys and the headline follow from the
    sides."""

    overrides: list[str]
    device: arguments.Device
    plan: TrialPlan
    rules: VerdictRules
    reader: Reader
    engines: arguments.EngineOptions = arguments.EngineOptions()
    picture: bool = False
    worth: bool = False


class Compared(NamedTuple):
    answer: ComparisonAnswer
    picture: Drawn
    broken: bool
    undecided: bool
    cancelled: bool  # by the user, once the verdict was known
    failed: str  # why there are no runs under draws, where one of them ended in an error


def compare(
    names: Names = None,
    a: A = "",
    b: B = "",
    overrides: Overrides = None,
    device: arguments.Device = "auto",
    seeds: Seeds = 5,
    pairs: Pairs = 20,
    min_effect: MinEffect = 0.5,
    min_engagement: MinEngagement = 5.0,
    gate: Gates = None,
    undecided: Undecided = "fail",
    draws: arguments.Draws = 16,
    quick: arguments.Quick = False,
    worth: Worth = False,
    jobs: arguments.Jobs = None,
    executor: arguments.ExecutorName = None,
    allow_divergence: AllowDivergence = False,
    exit_on_inconclusive: ExitOnInconclusive = False,
    engine: arguments.SideEngine = None,  # noqa: ARG001
    engine_python: arguments.EnginePython = None,
    engine_wheels: arguments.EngineWheels = None,
    engine_timeout: arguments.EngineTimeout = None,
    output_dir: OutputDir = None,
    meaning: arguments.Meaning = None,
    nsys: arguments.Tool = None,
    every_table: arguments.EveryTable = False,
    picture: arguments.WantsPicture = False,
    form: arguments.Form = "table",
) -> None:
    """Compare two sides: are the tokens the same, did the change take part, is B better than A. A case has its own
    (`schedbench list cases`), `compare cases` asks all; results or captures go without a scenario: compare A B.

    Exit codes: 0 done and gates passed; 1 a gate failed or is undecided, or the tokens differ; 2 usage, or sides that
    are not alike; 3 this machine cannot; 4 a run failed; 130 interrupted, 143 terminated: runs are in --output-dir.
    """
    scenario, a, b = _named(names or [], a, b, overrides or [])
    from ..profiles.captures.files import Reader
    from ..profiles.judge.compare import VerdictRules
    from ..profiles.judge.gates import parse
    from ..profiles.judge.trials import TrialPlan

    gates = tuple(map(parse, gate or ()))
    wanted = ComparisonOptions(
        overrides or [],
        device,
        TrialPlan(seeds, pairs, allow_divergence=allow_divergence, draws=0 if quick else draws),
        VerdictRules(min_effect, min_engagement, allow_divergence, gates, undecided == "pass"),
        Reader(meaning, nsys, arguments.command_line()),
        arguments.EngineOptions(engine_python, engine_wheels, engine_timeout),
        arguments.wants_picture(form, picture),
        worth,
    )
    arguments.use_workers(jobs, executor)
    if scenario == _LIBRARY and not (a or b):
        found = _library(wanted._replace(picture=False), output_dir=output_dir, form=form)
    else:
        found = [_compared(wanted, scenario, a, b, output_dir)]
        found[0].answer.show(form, every_table=every_table, picture=found[0].picture)
    raise typer.Exit(_exit_code(found, exit_on_inconclusive=exit_on_inconclusive))


def _exit_code(found: Sequence[Compared], *, exit_on_inconclusive: bool) -> int:
    if found[-1].cancelled:
        return INTERRUPTED
    if any(one.failed for one in found):
        return WORKLOAD_FAILED
    return GATE_FAILED if any(one.broken or (exit_on_inconclusive and one.undecided) for one in found) else 0


def _library(wanted: ComparisonOptions, *, output_dir: Path | None, form: arguments.Format) -> list[Compared]:
    """Compare the sides of every case, or of those up to the one that is interrupted, and print one table."""
    from ..profiles.judge.conclusion import cases_conclusion
    from ..scenarios.shipped import case_names
    from .answers import CasesAnswer

    found: dict[str, Compared] = {}
    for name in case_names():
        found[name] = _compared(wanted, name, "", "", output_dir and output_dir / name)
        if found[name].cancelled:
            break
    documents = {name: one.answer.document for name, one in found.items()}
    CasesAnswer({"conclusion": cases_conclusion(documents), "cases": documents}).show(form)
    return [*found.values()]


def _compared(
    wanted: ComparisonOptions, scenario: str | None, a: str, b: str, output_dir: Path | None
) -> Compared:
    from .console import status

    case = None if a or b or scenario is None else case_of(scenario, wanted.overrides)
    sides = _specs(a, b, wanted) if case is None else _specs(case.a, case.b, wanted)
    with (
        ends_interrupted("interrupted: there is no verdict"),
        status(f"{scenario}: 0 runs" if case else "0 runs") as update,
    ):
        notice = _kept(output_dir, wanted.plan, update)
        found = compared(wanted, scenario, sides, case, notice=notice, update=update)
    found.answer.keep(output_dir, "compare.json")
    if found.failed:
        echo(f"schedbench: the verdict was not asked under draws: {found.failed}", err=True)
    return found


def compared(
    wanted: ComparisonOptions,
    scenario: str | None,
    sides: tuple[SideSpec, SideSpec],
    case: Case | None,
    *,
    notice: Notice,
    update: Callable[[str], None],
) -> Compared:
    """Run both sides and judge them; of a ``case``, by its metric. An interruption of what follows the verdict, the
    draws and the worth, leaves that out."""
    from ..profiles.judge.compare import judge
    from ..profiles.judge.document import document
    from .answers import ComparisonAnswer

    question, first = _question(scenario, wanted.overrides, *sides)
    plan = replace(wanted.plan, first_seed=first, varied=sides[0].varied | sides[1].varied)
    rules = wanted.rules if case is None else replace(wanted.rules, headline=(case.metric,))
    if wanted.worth:
        from ..profiles.worth.worth import compared_with_worth, require_sides

        require_sides(question, *sides)
    clock = arguments.Stopwatch(wanted.reader.command)
    trials, drawn, picture = _conduct(question, *sides, plan, wanted, notice=notice, update=update)
    found = judge(trials, rules, drawn)
    cancelled = drawn.cancelled
    if wanted.worth and question is not None and not cancelled:
        try:
            found = compared_with_worth(found, question, *sides, update)
        except KeyboardInterrupt:
            cancelled = True
    run = clock.run(cancelled=cancelled)
    content = document(found, a=sides[0].label, b=sides[1].label, run=run, case=case)
    return Compared(
        ComparisonAnswer(content),
        picture,
        broken=found.broken,
        undecided=found.undecided,
        cancelled=cancelled,
        failed=drawn.abstained if drawn.failed else "",
    )


def case_of(scenario: str, overrides: list[str]) -> Case | None:
    """The case that the scenario is, if it is one."""
    from ..profiles.judge.trials import Question

    return Question.of(scenario, overrides).scenario().case


def _named(names: Sequence[str], a: str, b: str, overrides: list[str]) -> tuple[str | None, str, str]:
    """The scenario, if there is one, and the sides."""
    if len(names) < 2:
        if names and names[0] != _LIBRARY:
            from ..profiles.platform.names import refuse_mistyped

            refuse_mistyped(names[0], overrides)
        return (names[0] if names else None), a, b
    if len(names) > 2 or a or b:
        raise UsageError(
            "compare takes a scenario with --a and --b, or two stored results or captures, A and B"
        )
    return None, names[0], names[1]


def require_sides(a: object, b: object) -> None:
    """Raises UsageError where there is neither."""
    if not (a or b):
        raise UsageError(
            "compare needs --a and --b, or one of them against the scenario as it stands, or a case"
        )


def _specs(a: str, b: str, wanted: ComparisonOptions) -> tuple[SideSpec, SideSpec]:
    """Raises SideError, ScenarioError, which name the option; UsageError."""
    from ..profiles.judge.sides import parse
    from ..profiles.judge.worker import SideError, commit_of, here

    require_sides(a, b)
    found = []
    for option, text in (("--a", a), ("--b", b)):
        try:
            with arguments.typed_as(option, [""]):
                found.append(spec := parse(text, wanted.reader, wanted.engines.choice))
            if spec.ref is not None:
                commit_of(here(), spec.ref)
        except SideError as error:
            raise SideError(f"{option}: {error}") from None
    wanted.engines.require_all([spec.engine.name for spec in found if spec.engine is not None])
    return found[0], found[1]


def _question(
    name: str | None, overrides: list[str], a: SideSpec, b: SideSpec
) -> tuple[Question | None, int]:
    """The question, and the first workload seed. Raises LikenessError where the sides differ in more than they vary."""
    if a.stored and b.stored:
        return None, 0
    if name is None:
        raise UsageError("a scenario is needed unless both sides are stored results")
    from ..profiles.judge.likeness import LikenessError, unlike_questions
    from ..profiles.judge.trials import Question
    from ..profiles.platform.names import require_names

    question = Question.of(name, overrides)
    sides = []
    for option, spec in (("--a", a), ("--b", b)):
        if spec.ref is None and not spec.stored:
            with arguments.typed_as(option, spec.varied):
                sides.append(question.scenario(spec.overrides))
                require_names(sides[-1])
    for scenario in sides or [question.scenario()]:
        if scenario.faults:
            raise scenario.source.refuse(
                ("faults",), "compare judges runs that come to their end; check takes them"
            )
    if len(sides) == 2:
        differences = unlike_questions(
            sides[0].expanded(), sides[1].expanded(), varied=a.varied | b.varied, free=()
        )
        if differences:
            raise LikenessError(differences)
    return question, (sides[0] if sides else question.scenario()).measure.seed


def _conduct(
    question: Question | None,
    a: SideSpec,
    b: SideSpec,
    plan: TrialPlan,
    wanted: ComparisonOptions,
    *,
    notice: Notice,
    update: Callable[[str], None],
) -> tuple[Trials, DrawnRuns, Drawn]:
    from ..profiles.judge.sides import opened
    from ..profiles.judge.trials import TrialRequest, conduct, conduct_draws
    from .pictures import side_by_side

    order = TrialRequest(device=wanted.device, command=wanted.reader.command)
    with opened(question, a, b, order) as (baseline, candidate):
        trials = conduct(baseline, candidate, plan, notice)
        if plan.draws:
            update(f"both sides under {plan.draws} draws of the hardware's constants")
        drawn = conduct_draws(baseline, candidate, trials, plan, update)
        seed, draw = trials.a[0].seed, wanted.picture and not drawn.cancelled
        return trials, drawn, side_by_side(baseline, candidate, seed) if draw else ()


def _kept(output_dir: Path | None, plan: TrialPlan, update: Callable[[str], None]) -> Notice:
    """Writes the result of each run as it ends, so that a crash of one side does not lose the runs of the other."""
    counts = {"a": 0, "b": 0}
    for folder in [output_dir / side for side in counts] if output_dir is not None else ():
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("run-*.json"):
            stale.unlink()

    def keep(side: _Sides, sample: Sample) -> None:
        number = counts[side]
        counts[side] += 1
        total = 2 * plan.seeds if sample.exact else 2 * plan.pairs + 2
        update(f"{sum(counts.values())} of {total} runs")
        if output_dir is not None:
            warm_up = number == 0 and not sample.exact
            name = f"{side}-warm-up.json" if warm_up else f"{side}/run-{number:03d}.json"
            sample.result.write(output_dir / name)

    return keep
