"""A scenario over the product of the values of some keys: a metric, or its difference between two sides.

A cell is one run of each side, at one workload seed. Its sign is that seed's where times repeat exactly; where they are
measured it only indicates where to compare.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ...scenarios.overrides import as_numbers, expand
from ...scenarios.problems import ScenarioError, meant
from ..engines.names import expanded, is_engine
from ..judge.effects import MetricValue, judged_name, metric_names, metric_values, why_absent
from ..judge.likeness import comparable, same_tokens
from ..judge.sides import ENGINE, SideSpec, parse, split
from ..judge.statistics import percent
from ..judge.trials import Tokens, shortfalls, unfinished
from ..judge.verdict import MIN_EFFECT
from ..platform.engine_choice import EngineChoice
from ..platform.names import load_named
from ..record.provenance import Labels
from ..record.result import Abstained, Result

if TYPE_CHECKING:
    from ..platform.resolve import Resolved
    from .runs import Answer, Runs

Tone = Literal["better", "worse", "no change"]
Place = tuple[str, ...]  # a value of each axis

# The default baseline and candidate.
OVERLAP_PAYS: Final = ("overlap=false", "overlap=true")


class SweepError(ValueError):
    """A sweep is invalid."""


class Axis(NamedTuple):
    """``key`` is the full one; values are as they would be written in a scenario. The key ``engine`` has the names of
    engines of other projects."""

    key: str
    values: tuple[str, ...]

    def overrides(self, value: str) -> tuple[str, ...]:
        """Of the scenario."""
        return () if self.key == ENGINE else (f"{self.key}={value}",)


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """``sides`` are the baseline and the candidate, or one side whose metric is reported itself."""

    scenario: str
    overrides: tuple[str, ...]
    axes: tuple[Axis, ...]
    sides: tuple[SideSpec, ...]
    metric: str
    choose: Callable[[str], EngineChoice] = EngineChoice

    @property
    def places(self) -> Iterator[Place]:
        """All places, the last axis fastest."""
        return product(*(axis.values for axis in self.axes))

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of all engines of other projects."""
        axes = [axis.values for axis in self.axes if axis.key == ENGINE]
        return (*chain(*axes), *(side.engine.name for side in self.sides if side.engine is not None))

    def overrides_at(self, place: Place, side: SideSpec) -> tuple[str, ...]:
        at = zip(self.axes, place, strict=True)
        return (
            *self.overrides,
            *(one for axis, value in at for one in axis.overrides(value)),
            *side.overrides,
        )

    def engine_at(self, place: Place, side: SideSpec) -> EngineChoice | None:
        """The side's engine, or that of the axis of engines."""
        named = [value for axis, value in zip(self.axes, place, strict=True) if axis.key == ENGINE]
        return self.choose(named[0]) if named else side.engine


@dataclass(frozen=True, slots=True)
class Cell:
    """``values``, ``labels``, ``hardware``, ``packed`` and ``files`` have one entry per side. Where a side did not run
    there is only the ``refusal``; ``failed`` where it ran and did not come to its end. ``remark``: which requests the
    sides did not serve as the scenario has them. Results are packed because a sweep may have any number of cells, and
    the objects of a result take 120 KiB."""

    place: Place
    refusal: str = ""
    failed: bool = False
    remark: str = ""
    values: tuple[MetricValue, ...] = ()
    tokens: Tokens = "not applicable"
    labels: tuple[Labels, ...] = field(default=(), compare=False, repr=False)
    hardware: tuple[str, ...] = field(default=(), compare=False, repr=False)
    packed: tuple[bytes, ...] = field(default=(), compare=False, repr=False)
    files: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[Result, ...]:
        """Without what grows with the workload."""
        return tuple(pickle.loads(zlib.decompress(one)) for one in self.packed)

    @property
    def delta(self) -> float | None:
        """The excess of the candidate over the baseline in percent."""
        if len(self.values) < 2:
            return None
        a, b = self.values
        return percent(a.value, b.value)

    @property
    def sign(self) -> Tone | None:
        """The better side, however small the difference. None where the sides do not do the same work."""
        if self.delta is None or self.tokens == "different":
            return None
        if not abs(self.delta) > 0:
            return "no change"
        return "better" if (self.delta > 0) == (self.values[0].direction == "higher") else "worse"

    @property
    def tone(self) -> Tone | None:
        """As ``sign``, but for differences below the smallest effect of interest."""
        slight = self.sign is not None and abs(self.delta or 0.0) < MIN_EFFECT
        return "no change" if slight else self.sign


def planned(
    scenario: str,
    over: Sequence[str],
    *,
    sides: Sequence[str] = (),
    overrides: Sequence[str] = (),
    metric: str,
    choose: Callable[[str], EngineChoice] = EngineChoice,
) -> SweepPlan:
    """``choose`` completes the name of an engine. Raises SweepError, SideError, ScenarioError."""
    axes = tuple(map(_axis, over))
    specs = tuple(parse(side, choose=choose) for side in sides or ("",))
    if not axes:
        raise SweepError("a sweep needs --over key=v1,v2")
    if any(spec.ref is not None or spec.stored for spec in specs):
        raise SweepError(
            "sides of a sweep are key=value,...: other versions and stored results are for compare"
        )
    keys = [axis.key for axis in axes]
    twice = sorted({key for key in keys if keys.count(key) > 1 or any(key in spec.varied for spec in specs)})
    if twice:
        raise SweepError(f"{', '.join(twice)}: set twice, by --over or by a side")
    try:
        name = judged_name(metric)
    except KeyError:
        near = meant(metric, metric_names()) or "; schedbench explain lists them"
        raise SweepError(f"--metric: no metric {metric!r} that has a better side{near}") from None
    plan = SweepPlan(scenario, tuple(overrides), axes, specs, name, choose)
    _require_usable(plan, [place for place in plan.places if not _can_be_read(plan, place)], load_named)
    return plan


def has_own_sides(over: Sequence[str]) -> bool:
    """Whether an axis varies what the default sides differ in, or the engine."""
    return not {expand("overlap"), ENGINE}.isdisjoint(_axis(text).key for text in over)


def _axis(text: str) -> Axis:
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise SweepError(f"--over {text!r}: expected key=v1,v2")
    if key.strip() == ENGINE and all(map(is_engine, split(values))):
        return Axis(ENGINE, _distinct(ENGINE, [name for value in split(values) for name in expanded(value)]))
    return Axis(expand(key.strip()), _distinct(key.strip(), split(values)))


def _distinct(key: str, values: Sequence[str]) -> tuple[str, ...]:
    """The values, numbers in ascending order. Raises SweepError where one is given twice."""
    numbers = as_numbers(values)
    known: Sequence[object] = numbers or values
    twice = {value: None for value, one in zip(values, known, strict=True) if known.count(one) > 1}
    if twice:
        raise SweepError(f"--over {key}: given twice: {', '.join(twice)}")
    return tuple(sorted(values, key=float) if numbers else values)


def cells(plan: SweepPlan, runs: Runs, report: Callable[[str], None] = lambda _: None) -> Iterator[Cell]:
    """The cells in order, each as soon as it has run. Raises SweepError, before anything runs, for a value that
    the scenario cannot have; WorkersError, KeyboardInterrupt."""
    from ..platform.resolve import ask

    asked = [(place, questions_at(plan, place)) for place in plan.places]
    _require_usable(plan, [place for place, found in asked if isinstance(found, str)], ask)
    answers = runs.answers([one for _, found in asked if not isinstance(found, str) for one in found])
    for number, (place, questions) in enumerate(asked):
        report(f"{number} of {len(asked)} cells; next: {', '.join(place)}")
        if isinstance(questions, str):
            yield Cell(place, refusal=questions)
        else:
            found = answered(plan, place, [next(answers) for _ in questions])
            yield replace(found, files=() if found.refusal else tuple(map(runs.file, questions)))


def questions_at(plan: SweepPlan, place: Place) -> Sequence[Resolved] | str:
    """The questions of a cell, one for each side, or the reason why it cannot run."""
    try:
        return [_resolved(plan, place, side) for side in plan.sides]
    except ScenarioError as error:
        return error.reasons


def _require_usable(
    plan: SweepPlan, refused: Collection[Place], read: Callable[[str, Sequence[str]], object]
) -> None:
    """Raises SweepError for values of an axis that the scenario cannot have, such as misspelt names: all of their cells
    are ``refused``, and ``read`` refuses them alone. A value that only the rest of its cell rules out is a refusal of
    that cell."""
    named = {place: list(zip(plan.axes, place, strict=True)) for place in plan.places}
    usable = {value for place, values in named.items() if place not in refused for value in values}
    problems = []
    for axis, value in dict.fromkeys(value for values in named.values() for value in values):
        if (axis, value) in usable:
            continue
        try:
            read(plan.scenario, axis.overrides(value))
        except ScenarioError as error:
            problems.append(f"--over {axis.key}={value}: no cell could run: {error.reasons}")
    if problems:
        raise SweepError("\n".join(problems))


def _can_be_read(plan: SweepPlan, place: Place) -> bool:
    try:
        return bool([load_named(plan.scenario, plan.overrides_at(place, side)) for side in plan.sides])
    except ScenarioError:
        return False


def _packed(result: Result) -> bytes:
    none = Abstained(abstained="a sweep keeps no outputs")
    kept = result.model_copy(update={"requests": (), "copies": (), "syncs": (), "outputs": none})
    return zlib.compress(pickle.dumps(kept))


def answered(plan: SweepPlan, place: Place, answers: Sequence[Answer]) -> Cell:
    """The cell of which these are the results, one for each side, or the reasons why a side has none."""
    from ..run.crash import Crash

    results = [answer for answer in answers if isinstance(answer, Result)]
    refused = (answer for answer in answers if isinstance(answer, str))
    crashed = (str(answer) for answer in answers if isinstance(answer, Crash))
    failure = next(filter(None, chain(crashed, map(unfinished, results))), "")
    reason = next(refused, failure)
    found = [metric_values(result, (plan.metric,)).get(plan.metric) for result in results]
    known = tuple(value for value in found if value is not None)
    absent = f"{plan.metric}: {why_absent(plan.metric, results) or 'not measured'}"
    if reason or len(known) < len(found):
        return Cell(place, refusal=reason or absent, failed=bool(failure))
    sides = [(side.label, [result]) for side, result in zip(plan.sides, results, strict=True)]
    return Cell(
        place,
        remark=shortfalls(sides),
        values=known,
        tokens=_tokens(results),
        labels=tuple(result.labels for result in results),
        hardware=tuple(result.hardware.name for result in results),
        packed=tuple(map(_packed, results)),
    )


def _resolved(plan: SweepPlan, place: Place, side: SideSpec) -> Resolved:
    from ..platform.resolve import ask

    resolved = ask(plan.scenario, plan.overrides_at(place, side))
    if len(resolved.relays) > 1:
        raise resolved.scenario.source.refuse(("engine", "relays"), "a cell has one relay: give it as relay")
    if resolved.scenario.faults:
        raise resolved.scenario.source.refuse(("faults",), "a cell's run comes to its end; check takes them")
    return replace(resolved, engine=plan.engine_at(place, side))


def _tokens(results: Sequence[Result]) -> Tokens:
    if len(results) < 2 or not comparable(*results):
        return "not applicable"
    return "equal" if same_tokens(*results) else "different"
