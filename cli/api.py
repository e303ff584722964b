"""The Python interface: the results of the command line as objects. ``import schedbench`` has these functions.

Keyword arguments are keys of the scenario, shortened as for ``--set``: ``run("mixed", overlap=False)``, or have the
names of options: ``run("mixed", engine="sglang:../sglang", engine_python="venv/bin/python")``. Errors are those of the
command line, with the names of arguments in place of options. Nothing is printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from .answers import Answer, CheckAnswer, ComparisonAnswer, RunAnswer, stored
from .errors import UsageError

if TYPE_CHECKING:
    from ..profiles.judge.sides import SideSpec
    from ..profiles.platform.engine_choice import EngineChoice
    from ..profiles.platform.resolve import Resolved
    from ..profiles.ranks.execute import Options
    from ..profiles.record.result import Result
    from ..scenarios.problems import Problem
    from .compare import ComparisonOptions

Value = bool | int | float | str | None | Sequence[Any] | Mapping[str, Any]
Runs = RunAnswer | Sequence[RunAnswer]
SideOfComparison = str | Path | Runs | Mapping[str, Value]
P = ParamSpec("P")
T = TypeVar("T")


def _naming_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """The function with errors that name its arguments where those of the command line name options."""

    def named(text: str) -> str:
        return re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), text)

    def meaning(problem: Problem) -> str:
        """The message, of an unknown key with the argument that is nearest to it."""
        from ..scenarios.problems import meant

        is_unknown = problem.message.startswith("unknown key") and problem.path.isidentifier()
        near = meant(problem.path, signature(function).parameters) if is_unknown else ""
        return f"unknown key{near}" if near else problem.message

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        from ..scenarios.overrides import OPTION
        from ..scenarios.problems import ScenarioError, SourceLocation

        try:
            return function(*args, **kwargs)
        except UsageError as error:
            raise UsageError(named(str(error))) from None
        except ScenarioError as error:
            raise ScenarioError(
                problem._replace(place=SourceLocation("keyword argument"), message=meaning(problem))
                if problem.place == OPTION
                else problem._replace(place=problem.place._replace(file=named(problem.place.file)))
                for problem in error.problems
            ) from None

    return called


@_naming_arguments
def run(
    scenario: str | Path,
    *,
    device: Literal["auto", "cuda", "vgpu"] = "auto",
    faults: Sequence[str] = (),
    expect: Sequence[str] = (),
    hazards: bool = False,
    save_tokens: bool = False,
    engine: str | None = None,
    engine_python: str | None = None,
    engine_wheels: Path | None = None,
    engine_timeout: float | None = None,
    **keys: Value,
) -> RunAnswer:
    """Run a scenario once, as ``schedbench run`` does."""
    from ..profiles.ranks.execute import Options
    from .arguments import EngineOptions, engine_choice

    chosen = engine_choice(engine, EngineOptions(engine_python, engine_wheels, engine_timeout))
    question = _question(scenario, keys, faults, expect, chosen)
    options = Options(
        device=device,
        save_tokens=save_tokens,
        command=_typed("run", scenario, keys, engine=engine),
        hazards=hazards,
    )
    return _executed(question, options)


@_naming_arguments
def worth(
    scenario: str | Path, *, rooms: int | None = None, faults: Sequence[str] = (), **keys: Value
) -> RunAnswer:
    """Run a scenario, and again with each line and host phase changed; the answer's result has ``worth``."""
    from ..profiles.ranks.execute import Options
    from .worth import ROOMS, require_worth, with_worth

    if rooms is not None and rooms < 0:
        raise UsageError(f"--rooms: {rooms} is less than 0")
    question = _question(scenario, keys, faults)
    options = Options(device="vgpu", command=_typed("worth", scenario, keys))
    require_worth(question, options)
    outcome = _executed(question, options).outcome
    result = with_worth(question, outcome.result, _silence, rooms=ROOMS if rooms is None else rooms)
    return RunAnswer(replace(outcome, result=_whole(result)))


@_naming_arguments
def check(
    scenario: str | Path,
    *,
    seeds: int | None = None,
    quick: bool = False,
    faults: Sequence[str] = (),
    expect: Sequence[str] = (),
    engine: str | None = None,
    engine_python: str | None = None,
    engine_wheels: Path | None = None,
    engine_timeout: float | None = None,
    against: str | None = None,
    **keys: Value,
) -> CheckAnswer:
    """Check tokens, hazards, invariants and budgets of a scenario, as ``schedbench check`` does."""
    from .arguments import EngineOptions, Stopwatch
    from .check import examine_on_vgpu, examined_engines

    clock = Stopwatch(_typed("check", scenario, keys, engine=engine, against=against))
    chosen, other = examined_engines(
        engine, against, EngineOptions(engine_python, engine_wheels, engine_timeout)
    )
    question = _question(scenario, keys, faults, expect, chosen)
    content = examine_on_vgpu(question, clock, _silence, seeds=0 if quick else seeds, against=other)
    if content["run"]["cancelled"]:
        raise KeyboardInterrupt
    return CheckAnswer(content)


@_naming_arguments
def compare(
    *of: str | Path | Runs,
    a: SideOfComparison = "",
    b: SideOfComparison = "",
    seeds: int = 5,
    pairs: int = 20,
    draws: int = 16,
    quick: bool = False,
    min_effect: float = 0.5,
    min_engagement: float = 5.0,
    gates: Sequence[str] = (),
    allow_divergence: bool = False,
    device: Literal["auto", "cuda", "vgpu"] = "auto",
    engine_python: str | None = None,
    engine_wheels: Path | None = None,
    engine_timeout: float | None = None,
    **keys: Value,
) -> ComparisonAnswer:
    """Compare two results, or the two sides of a scenario: ``compare(first, second)`` or ``compare("mixed",
    a={"relay": "pr25945"}, b="relay=latest")``. A result is an answer of ``run``, several of them, or a file or folder.
    ``keys`` are set on both sides. Raises KeyboardInterrupt where the user interrupts it."""
    from ..profiles.captures.files import Reader
    from ..profiles.judge.compare import VerdictRules
    from ..profiles.judge.gates import parse
    from ..profiles.judge.trials import TrialPlan
    from .arguments import EngineOptions
    from .compare import ComparisonOptions, case_of, compared, require_sides

    if isinstance(gates, str):
        raise UsageError(f"--gates: expected a list of gates, got {gates!r}")
    scenario, a, b = _sides(of, a, b)
    options = ComparisonOptions(
        settings(keys),
        device,
        TrialPlan(seeds, pairs, allow_divergence=allow_divergence, draws=0 if quick else draws),
        VerdictRules(min_effect, min_engagement, allow_divergence, tuple(map(parse, gates))),
        Reader(command=_typed("compare", *of, keys)),
        EngineOptions(engine_python, engine_wheels, engine_timeout),
    )
    case = case_of(scenario, options.overrides) if scenario and not (a or b) else None
    sides = (case.a, case.b) if case else (a, b)
    require_sides(*sides)
    specs = (_spec(sides[0], "A", options), _spec(sides[1], "B", options))
    found = compared(options, scenario, specs, case, notice=lambda *_: None, update=_silence)
    if found.cancelled:
        raise KeyboardInterrupt
    return found.answer


def load(path: str | Path) -> Answer:
    """The answer in a stored document of any command, in its folder, or in a capture. Raises what ``schedbench report``
    raises."""
    from ..profiles.captures.files import Reader

    return stored(Path(path), Reader(command=_typed("load", path)))


def settings(keys: Mapping[str, Value]) -> list[str]:
    """The keys as ``--set`` takes them; plain words without quotes, as they are typed."""
    return [
        f"{key}={value if _is_word(value) else json.dumps(value, default=str)}" for key, value in keys.items()
    ]


def _is_word(value: Value) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.+-]*", value) is not None


def _question(
    scenario: str | Path,
    keys: Mapping[str, Value],
    faults: Sequence[str],
    expect: Sequence[str] = (),
    engine: EngineChoice | None = None,
) -> Resolved:
    from .arguments import resolved

    return resolved(str(scenario), settings(keys), faults=faults, budgets=expect, engine=engine)


def _executed(question: Resolved, options: Options) -> RunAnswer:
    """Raises KeyboardInterrupt where the run was interrupted."""
    from ..profiles.ranks.execute import execute

    if len(question.relays) > 1:
        source = question.scenario.source
        raise source.refuse(("engine", "relays"), "an answer has one relay: give it as relay")
    outcome = execute(question, question.relays[0], options)
    _whole(outcome.result)
    return RunAnswer(outcome)


def _whole(result: Result) -> Result:
    if result.run.cancelled:
        raise KeyboardInterrupt
    return result


def _sides(
    of: Sequence[str | Path | Runs], a: SideOfComparison, b: SideOfComparison
) -> tuple[str | None, SideOfComparison, SideOfComparison]:
    """The scenario, if there is one, and the sides."""
    if len(of) == 2 and not (a or b):
        return None, of[0], of[1]
    if len(of) == 1 and isinstance(of[0], str | Path):
        return str(of[0]), a, b
    raise UsageError("compare takes a scenario with a and b, or two results")


def _spec(side: SideOfComparison, label: str, options: ComparisonOptions) -> SideSpec:
    from ..profiles.judge.sides import SideSpec, parse

    if isinstance(side, str | Path):
        return parse(str(side), options.reader, options.engines.choice)
    if isinstance(side, Mapping):
        return parse(",".join(settings(side)), options.reader, options.engines.choice)
    runs = [side] if isinstance(side, RunAnswer) else side
    return SideSpec(label, stored=tuple(run.result for run in runs))


def _typed(verb: str, *words: object, **options: str | None) -> str:
    """The call, as documents keep it, with the options that were given."""
    *names, keys = words
    shown = [repr(str(name)) for name in names if isinstance(name, str | Path)]
    given = (
        [f"{key}={value!r}" for key, value in keys.items()]
        if isinstance(keys, Mapping)
        else [repr(str(keys))]
    )
    chosen = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    return f"schedbench.{verb}({', '.join((*shown, *chosen, *given))})"


def _silence(text: str) -> None: ...
