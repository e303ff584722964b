"""What the source lines that differ between two runs are worth: the part of the difference that each accounts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..judge.compare import Comparison
from ..judge.effects import LineEffect, lines, mean
from ..judge.local import unrepeatable
from ..judge.sides import SideSpec
from ..judge.statistics import percent
from ..judge.trials import Question, TrialRequest, resolved_for
from ..platform.resolve import Resolved
from ..ranks.execute import Options
from ..record.result import Result
from ..sweeps.ladder import Ladder
from .worth import INTEREST, LinePlace, Notice, gains_without

_OF_ITS_OWN = "source lines of another project's engine cannot be changed"


class WorthError(ValueError):
    """Counterfactual runs would not be the same run but for one thing."""


class AskedSide(NamedTuple):
    """``question`` is None where the side cannot be run here: it is another version of the program."""

    question: Resolved | None
    result: Result


def refusal(question: Resolved, options: Options) -> str:
    """The reason why no line of the run can be changed; empty if lines can."""
    return _OF_ITS_OWN if question.engine is not None else unrepeatable(question, options)


def require_sides(question: Question | None, a: SideSpec, b: SideSpec) -> None:
    """Raises WorthError where the lines of neither side can be changed."""
    if question is None or a.stored or b.stored:
        raise WorthError("worth: stored results cannot be run again")
    if a.engine or b.engine:
        raise WorthError(f"worth: {_OF_ITS_OWN}")
    asked = [found for spec in (a, b) if (found := _resolved(question, spec, None))]
    if not asked:
        raise WorthError("worth: lines of a git: side cannot be changed: leave one side to the working tree")
    for found in asked:
        if reason := refusal(found, Options(device="vgpu")):
            raise WorthError(f"worth: {reason}")


def _resolved(question: Question, spec: SideSpec, seed: int | None) -> Resolved | None:
    if spec.ref is not None:
        return None
    return resolved_for(question, TrialRequest(spec.overrides, seed, device="vgpu"))


def compared_with_worth(
    found: Comparison, question: Question, a: SideSpec, b: SideSpec, notice: Notice
) -> Comparison:
    """The comparison with what the differing lines are worth in the first seed. Raises what ``execute`` raises."""
    side_a, side_b = (
        AskedSide(_resolved(question, spec, results[0].scenario.seed), results[0])
        for spec, results in zip((a, b), found.trials.results, strict=True)
    )
    return replace(found, lines=with_worth(found.lines, side_a, side_b, notice))


def climbed_with_worth(ladder: Ladder, notice: Notice) -> Ladder:
    """The ladder with what the lines are worth in which a rung differs from the one before it, where their throughputs
    differ by as much as is of interest."""
    sides = [
        AskedSide(replace(ladder.resolved, relays=(rung.relay,)), rung.outcome.result)
        for rung in ladder.rungs
    ]
    found = list(ladder.rungs[:1])
    for rung, before, after in zip(ladder.rungs[1:], sides, sides[1:], strict=False):
        asked: Sequence[LineEffect] = ()
        x, y = (mean(side.result, "output_throughput") for side in (before, after))
        if x and y and abs(percent(x, y)) >= INTEREST:
            asked = with_worth(lines([before.result], [after.result]), before, after, notice)
        found.append(replace(rung, lines=tuple(line for line in asked if line.a != line.b)))
    return replace(ladder, rungs=tuple(found))


def with_worth(found: Sequence[LineEffect], a: AskedSide, b: AskedSide, notice: Notice) -> list[LineEffect]:
    """The lines, those that differ with the part of B's throughput against A's that each alone accounts for, in
    percent: what A gains without the line, less what B gains without it."""
    differing = {place for line in found if line.a != line.b and (place := _place(line)) is not None}
    on_a = differing & {_place(line) for line in found if line.a}
    on_b = differing & {_place(line) for line in found if line.b}
    gains_a, gains_b = _gains(a, on_a, notice), _gains(b, on_b, notice)
    worth = {
        place: 100 * ((1 + gains_a.get(place, 0.0) / 100) / (1 + gains_b.get(place, 0.0) / 100) - 1)
        for place in differing
        if (place not in on_a or place in gains_a) and (place not in on_b or place in gains_b)
    }
    return [
        line
        if line.a == line.b or (place := _place(line)) is None
        else line._replace(worth_pct=worth.get(place))
        for line in found
    ]


def _gains(side: AskedSide, places: set[LinePlace], notice: Notice) -> dict[LinePlace, float]:
    if side.question is None or not places:
        return {}
    return gains_without(side.question, side.result, places, notice)


def _place(line: LineEffect) -> LinePlace | None:
    return (line.site.file, line.site.line) if line.site else None
