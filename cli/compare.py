"""``schedbench compare``: compare two sides, and print the verdict and its evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

import typer

from . import arguments
from .errors import GATE_FAILED, INTERRUPTED, WORKLOAD_FAILED, UsageError

if TYPE_CHECKING:
    from ..profiles.captures.files import Reader
    from ..profiles.judge.compare import VerdictRules
    from ..profiles.judge.sides import SideSpec
    from ..profiles.judge.trials import Notice, Question, Sample, TrialPlan, Trials
    from .answers import CasesAnswer, ComparisonAnswer, RunAnswer

    ASide: TypeAlias = str | Path | RunAnswer | Sequence[RunAnswer] | Mapping[str, arguments.Value]
    Listed: TypeAlias = ASide
else:  # what Typer makes of such arguments
    ASide, Listed = str, list[str]

_LIBRARY = "cases"
_Sides = Literal["a", "b"]
_SIDE = (
    "key=value,... or git:REF or another project's engine, such as sglang:FOLDER@REF, "
    "or a stored result.json, a capture, or a folder of either."
)

Names = Annotated[
    Listed,
    typer.Argument(
        metavar="[SCENARIO | A B]", help="A scenario's file or name; or two stored results or captures."
    ),
]
A = Annotated[ASide, typer.Option("--a", metavar="SIDE", help=f"The baseline: {_SIDE}")]
B = Annotated[ASide, typer.Option("--b", metavar="SIDE", help="The candidate, in the same forms.")]
Overrides = Annotated[
    arguments.Texts, typer.Option("--set", metavar="KEY=VALUE", help="Override a key on both sides.")
]
Seeds = Annotated[int, typer.Option(min=1, help="Workload seeds where times are emulated: 5 for a verdict.")]
Pairs = Annotated[
    int,
    typer.Option(
        min=1,
        help="Pairs of interleaved blocks where times are measured, two for each workload seed: 14 for a verdict.",
    ),
]
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
    arguments.Texts,
    typer.Option(
        "--gate",
        metavar="NAME:BOUND",
        help="How much worse B may be (throughput:2%), how much better it has to be (better:ttft_ms:5%),"
        " a count of its worst step (decode.steady.schedule.h2d:0), or what it adds per step (added.sync:0).",
    ),
]
Undecided = Annotated[
    Literal["fail", "pass"], typer.Option("--undecided", help="What a gate that cannot be decided does.")
]
AllowDivergence = Annotated[
    bool, typer.Option("--allow-divergence", help="Judge performance although the tokens differ.")
]
ExitOnInconclusive = Annotated[
    bool,
    typer.Option("--exit-on-inconclusive", help="No verdict, or none on a gate, is not passed: exit with 1."),
]
Worth = Annotated[
    bool,
    typer.Option(
        "--worth", help="Run again without each source line that differs, to find what it accounts for."
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(help="Keep compare.json, or cases.json of all cases, and every run's result here."),
]


class ComparisonOptions(NamedTuple):
    """The options that hold for every comparison. The first seed, the varied keys and the headline follow from the
    sides."""

    overrides: Sequence[str]
    device: arguments.Device
    plan: TrialPlan
    rules: VerdictRules
    reader: Reader
    engines: arguments.EngineOptions
    picture: bool
    worth: bool


def compare(
    *of: Names,
    a: A = "",
    b: B = "",
    overrides: Overrides = (),
    device: arguments.Device = "auto",
    seeds: Seeds = 5,
    pairs: Pairs = 20,
    min_effect: MinEffect = 0.5,
    min_engagement: MinEngagement = 5.0,
    gates: Gates = (),
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
    picture: arguments.WantsPicture = False,
    **keys: arguments.Value,
) -> ComparisonAnswer | CasesAnswer:
    """Compare two sides: are the tokens the same, did the change take part, is B better than A. A case has its own
    (`schedbench list cases`), `compare cases` asks all; results or captures go without a scenario: compare A B.

    Exit codes: 0 done and gates passed; 1 a gate failed or is undecided, the tokens differ, or B has a hazard that A
    has not; 2 usage, or sides that are not alike; 3 this machine cannot; 4 a run failed; 130 interrupted, 143
    terminated: runs are in --output-dir.
    """
    given = [*overrides, *arguments.settings(keys)]
    scenario, a, b = _named(of, a, b, given)
    from ..profiles.captures.files import Reader
    from ..profiles.judge.compare import VerdictRules
    from ..profiles.judge.gates import parse
    from ..profiles.judge.trials import TrialPlan

    bounds, passes = tuple(map(parse, gates)), undecided == "pass"
    wanted = ComparisonOptions(
        given,
        device,
        TrialPlan(seeds, pairs + pairs % 2, allow_divergence=allow_divergence, draws=0 if quick else draws),
        VerdictRules(min_effect, min_engagement, allow_divergence, bounds, passes, exit_on_inconclusive),
        Reader(meaning, nsys, arguments.command_line()),
        arguments.EngineOptions(engine_python, engine_wheels, engine_timeout),
        picture,
        worth,
    )
    arguments.use_workers(jobs, executor)
    arguments.make_output_dir(output_dir)
    if scenario == _LIBRARY and not (a or b or arguments.python_call.get()):
        return _library(wanted._replace(picture=False), output_dir)
    return _compared(wanted, scenario, a, b, output_dir)


def _library(wanted: ComparisonOptions, output_dir: Path | None) -> CasesAnswer:
    """Compare the sides of every case, or of those up to the one that is interrupted."""
    from ..profiles.judge.conclusion import cases_conclusion
    from ..scenarios.shipped import case_names
    from .answers import CasesAnswer

    found: dict[str, ComparisonAnswer] = {}
    names, codes, clock = case_names(), [0], arguments.Stopwatch()
    for name in names:
        try:
            found[name] = _compared(wanted, name, "", "", output_dir and output_dir / name)
            codes.append(found[name].exit_code or 0)
        except KeyboardInterrupt:
            codes.append(INTERRUPTED)
        if codes[-1] == INTERRUPTED:
            break
    documents = {name: one.document for name, one in found.items()}
    run = clock.run(cancelled=INTERRUPTED in codes)
    said = cases_conclusion(documents, of=len(names), interrupted=run["cancelled"])
    return CasesAnswer(
        {"conclusion": said, "cases": documents, "run": run},
        remarks=[remark for one in found.values() for remark in one.remarks],
        unused=[one for answer in found.values() for one in answer.unused],
        exit_code=max(codes),
    ).kept(output_dir)


def _compared(
    wanted: ComparisonOptions, scenario: str | None, a: ASide, b: ASide, output_dir: Path | None
) -> ComparisonAnswer:
    """Run both sides and judge them; of a case, by its metric. An interruption of what follows the verdict, the draws
    and the worth, leaves that out."""
    from ..profiles.judge.compare import judge
    from ..profiles.judge.document import document
    from ..profiles.judge.sides import opened
    from ..profiles.judge.trials import Question, TrialRequest, conduct, conduct_draws
    from .answers import ComparisonAnswer
    from .console import status
    from .pictures import side_by_side

    case = None if a or b or scenario is None else Question.of(scenario, wanted.overrides).scenario().case
    sides = _specs(a, b, wanted) if case is None else _specs(case.a, case.b, wanted)
    with status(f"{scenario}: 0 runs" if case else "0 runs") as update:
        question, first = _question(scenario, wanted.overrides, *sides)
        plan = replace(wanted.plan, first_seed=first, varied=sides[0].varied | sides[1].varied)
        rules = wanted.rules if case is None else replace(wanted.rules, headline=(case.metric,))
        if wanted.worth:
            from ..profiles.worth.worth import compared_with_worth, require_sides

            require_sides(question, *sides)
        clock = arguments.Stopwatch()
        order = TrialRequest(device=wanted.device, command=wanted.reader.command)
        with opened(question, *sides, order) as (baseline, candidate):
            try:
                trials = conduct(baseline, candidate, plan, _kept(output_dir, plan, update))
            except KeyboardInterrupt:
                raise KeyboardInterrupt(_without_verdict(output_dir)) from None
            if plan.draws:
                update(f"both sides under {plan.draws} draws of the hardware's constants")
            drawn = conduct_draws(baseline, candidate, trials, plan, update)
            drawable = wanted.picture and not drawn.cancelled
            picture = side_by_side(baseline, candidate, trials.a[0].seed) if drawable else ()
        found = judge(trials, rules, drawn)
        cancelled = drawn.cancelled
        if wanted.worth and question is not None and not cancelled:
            try:
                found = compared_with_worth(found, question, *sides, update)
            except KeyboardInterrupt:
                cancelled = True
    run = clock.run(cancelled=cancelled)
    content = document(found, a=sides[0].label, b=sides[1].label, run=run, case=case)
    failed = [f"schedbench: the verdict was not asked under draws: {drawn.abstained}"] * drawn.failed
    code = INTERRUPTED if cancelled else WORKLOAD_FAILED if failed else GATE_FAILED if found.broken else 0
    unused = _unused(sides, trials)
    answer = ComparisonAnswer(content, picture=picture, remarks=failed, unused=unused, exit_code=code)
    return answer.kept(output_dir)


def _unused(sides: Sequence[SideSpec], trials: Trials) -> list[tuple[str, str]]:
    """The options that such runs have no use for, and why."""
    if any(side.stored for side in sides):
        return [(name, "stored results are not run again") for name in ("seeds", "pairs", "draws", "quick")]
    if trials.design == "blocks":
        return [(name, "times are measured") for name in ("seeds", "draws", "quick")]
    return [("pairs", "times are emulated")] * trials.a[0].exact


def _without_verdict(output_dir: Path | None) -> str:
    """What an interruption of the runs leaves; empty where that is nothing."""
    from ..profiles.record.result import read

    parts = [read(path).run.cancelled for path in output_dir.glob("[ab]/run-*.json")] if output_dir else []
    kept = f"{parts.count(False)} whole, {parts.count(True)} interrupted"
    return f"there is no verdict; runs kept in {output_dir}: {kept}" if parts else ""


def _named(of: Sequence[ASide], a: ASide, b: ASide, overrides: list[str]) -> tuple[str | None, ASide, ASide]:
    """The scenario, if there is one, and the sides."""
    if len(of) == 2 and not (a or b):
        return None, of[0], of[1]
    if not of:
        return None, a, b
    if len(of) > 1 or not isinstance(of[0], str | Path):
        raise UsageError(
            "compare takes a scenario with --a and --b, or two stored results or captures, A and B"
        )
    scenario = str(of[0])
    if scenario != _LIBRARY:
        from ..profiles.platform.names import refuse_mistyped

        refuse_mistyped(scenario, overrides)
    return scenario, a, b


def _specs(a: ASide, b: ASide, wanted: ComparisonOptions) -> tuple[SideSpec, SideSpec]:
    """Raises SideError, ScenarioError, which name the option; UsageError."""
    from ..profiles.judge.worker import SideError, commit_of, here

    if not (a or b):
        raise UsageError(
            "compare needs --a and --b, or one of them against the scenario as it stands, or a case"
        )
    found = []
    for option, side in (("--a", a), ("--b", b)):
        try:
            with arguments.typed_as(option, [""]):
                found.append(spec := _spec(option, side, wanted))
            if spec.ref is not None:
                commit_of(here(), spec.ref)
        except SideError as error:
            raise SideError(f"{option}: {error}") from None
    wanted.engines.require_all([spec.engine.name for spec in found if spec.engine is not None])
    return found[0], found[1]


def _spec(option: str, side: ASide, wanted: ComparisonOptions) -> SideSpec:
    from ..profiles.judge.sides import SideSpec, parse
    from .answers import RunAnswer

    if isinstance(side, Mapping):
        side = ",".join(arguments.settings(side))
    if isinstance(side, str | Path):
        return parse(str(side), wanted.reader, wanted.engines.choice)
    runs = [side] if isinstance(side, RunAnswer) else side
    if not (isinstance(runs, Sequence) and all(isinstance(run, RunAnswer) for run in runs)):
        raise UsageError(f"{option}: expected keys, a path, or answers of run, got {side!r}")
    return SideSpec(option.removeprefix("--").upper(), stored=tuple(run.result for run in runs))


def _question(
    name: str | None, overrides: Sequence[str], a: SideSpec, b: SideSpec
) -> tuple[Question | None, int]:
    """The question, and the first workload seed. Raises LikenessError where the sides differ in more than they vary."""
    if a.stored and b.stored:
        return None, 0
    if name is None:
        raise UsageError("a scenario is needed unless both sides are stored results")
    from ..profiles.judge.likeness import LikenessError, unlike_questions
    from ..profiles.judge.trials import Question, TrialRequest, resolved_for
    from ..profiles.platform.names import require_names

    question = Question.of(name, overrides)
    local = [
        (option, spec) for option, spec in (("--a", a), ("--b", b)) if spec.ref is None and not spec.stored
    ]
    sides = []
    for option, spec in local:
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
    for option, spec in local:  # last, since it imports torch
        with arguments.typed_as(option, spec.varied):
            resolved_for(question, TrialRequest(overrides=spec.overrides, engine=spec.engine))
    return question, (sides[0] if sides else question.scenario()).measure.seed


def _kept(output_dir: Path | None, plan: TrialPlan, update: Callable[[str], None]) -> Notice:
    """Writes the result of each run as it ends, so that a crash of one side does not lose the runs of the other. The
    runs and the document of an earlier comparison are removed first."""
    from .answers import ComparisonAnswer

    counts = {"a": 0, "b": 0}
    if output_dir is not None:
        for side in counts:
            (output_dir / side).mkdir(parents=True, exist_ok=True)
        for stale in (*output_dir.glob("[ab]/run-*.json"), output_dir / ComparisonAnswer.file):
            stale.unlink(missing_ok=True)

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
