"""Counterfactual runs: what throughput, latencies and idle time are if a line does not wait, copies from pinned memory,
or is not there, or if a host phase takes half of its time; and which part of the difference between two runs each of
the lines accounts for that differ.

Each is a whole run, so that batches form as they would. Its tokens have to be those of the run as it is.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil, log2
from typing import Any, Final, Literal, NamedTuple, TypeVar

from ..judge.compare import Comparison
from ..judge.effects import LineEffect, LineIdentity, line_identity, lines, value_of
from ..judge.local import unrepeatable, without_values
from ..judge.sides import SideSpec
from ..judge.statistics import percent
from ..judge.trials import Question, TrialRequest, resolved_for
from ..measure.steps import TimelineError, is_iteration
from ..platform.hardware import HardwareProfile, PhaseLine
from ..platform.pool import MapFunction, spread
from ..platform.resolve import Resolved
from ..ranks.execute import Options, execute, whole
from ..record.result import Outputs, Result, WorthPart, WorthRow
from ..vgpu.counterfactual import Counterfactual
from .candidates import EarlySettles, LinePlace, LineSurvey, SourceLine, phases, source_lines

INTEREST: Final = 0.1  # percent of throughput, TTFT, TPOT or a step's time; a smaller change does not show

OTHER_TOKENS: Final = "tokens would be others: the scenario's depend on how batches form"
TOO_EARLY: Final = "the host would give out tokens before the device has computed them"

Change = Literal["no wait", "pinned", "absent", "half"]
Place = SourceLine | str  # or the name of a host phase
Asked = tuple[Resolved | None, Result]
"""A side's question, None where it cannot be run here because it is another version of the program, and its result."""
Room = tuple[float, float | None]  # us per step: a time that does not show, and one that does
Notice = Callable[[str], None]
T = TypeVar("T")


class Figures(NamedTuple):
    """Means; None where the run has no such number. ``step_us`` is the time of the whole run by its number of steps.
    ``digest`` is of the tokens, or says why there are none. ``early``: steps that the host settled before the device
    had computed them."""

    output_throughput: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    forward_idle_us_per_step: float | None
    step_us: float | None
    digest: str
    early: int

    def numbers(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in self._fields[:-2]}

    def void(self, base: Figures) -> str:
        """Why these are not figures of the same work as in ``base``; empty if they are."""
        return TOO_EARLY if self.early > base.early else "" if self.digest == base.digest else OTHER_TOKENS

    def is_beaten_by(self, other: Figures) -> bool:
        """Whether any figure of ``other`` is better by as much as is of interest."""
        idle, theirs = (x.forward_idle_us_per_step or 0.0 for x in (self, other))
        pairs = [
            (other.output_throughput, self.output_throughput),
            (self.ttft_ms, other.ttft_ms),
            (self.tpot_ms, other.tpot_ms),
        ]
        return idle - theirs > INTEREST / 100 * (self.step_us or 0.0) or any(
            high is not None and low is not None and high - low > INTEREST / 100 * high for high, low in pairs
        )


def figures(result: Result, ranks: Sequence[EarlySettles]) -> Figures:
    outputs, throughput = result.outputs, value_of(result, "output_throughput")
    steps = sum(counts.steps for kind, counts in result.per_step.items() if is_iteration(kind))
    tokens = sum(request.output_tokens for request in result.requests)
    return Figures(
        output_throughput=throughput,
        ttft_ms=value_of(result, "ttft_ms"),
        tpot_ms=value_of(result, "tpot_ms"),
        forward_idle_us_per_step=value_of(result, "forward_idle_us_per_step"),
        step_us=1e6 * tokens / throughput / steps if throughput and steps else None,
        digest=outputs.digest if isinstance(outputs, Outputs) else outputs.abstained,
        early=sum(settles.count for settles in ranks),
    )


def tried(question: Resolved, asked: tuple[Place, Change | Literal["longer"]], extra: int = 0) -> Figures:
    """Run the question with a place changed, or with one that takes ``extra`` ns longer in each step."""
    (place, change), changed = asked, None
    if isinstance(place, str):
        factor = 0.5 if change == "half" else 1.0
        question = replace(question, hardware=_with_phase(question.hardware, place, factor, extra))
    else:
        assert change != "half"
        changed = Counterfactual(place.site.file, place.site.line, change, extra)
    settles = [EarlySettles() for _ in range(question.scenario.engine.ranks)]
    try:
        result = whole(execute(question, Options(device="vgpu", counterfactual=changed), extra_sinks=settles))
    except TimelineError:
        # Records of a step came after later steps had been settled: the host did not wait at all.
        return Figures(None, None, None, None, None, "", sys.maxsize)
    return figures(result, settles)


def _with_phase(profile: HardwareProfile, name: str, factor: float, extra: int) -> HardwareProfile:
    """The profile with other host times of a phase, for every kind of step. They may be longer than a file's may."""

    def changed(line: PhaseLine) -> dict[str, object]:
        a, b = factor * line.a.value + extra, factor * line.b.value
        return {
            "a": line.a.model_copy(update={"value": a}),
            "b": line.b.model_copy(update={"value": b}),
        }

    phase = profile.phases[name]
    kinds = {kind: line.model_copy(update=changed(line)) for kind, line in phase.kinds.items()}
    phase = phase.model_copy(update={**changed(phase), "kinds": kinds})
    return profile.model_copy(update={"phases": {**profile.phases, name: phase}})


def room(question: Resolved, base: Figures, place: Place) -> Room:
    """Search for the time per step by which a hidden place may take longer, to a factor of two. The second time is None
    where that of a whole step does not show."""

    def shows(exponent: int) -> bool:
        return tried(question, (place, "longer"), 1000 * 2**exponent).is_beaten_by(base)

    limit = ceil(log2(base.step_us or 1.0)) + 1
    first = bisect_left(range(limit), True, key=shows)
    return float(2 ** (first - 1) if first else 0), None if first == limit else float(2**first)


def worth(question: Resolved, known: Result, notice: Notice, *, rooms: int) -> Result:
    """The result, if it is that of a whole run behind which nothing was interrupted, with what is to be gained from the
    lines and phases of the run; ``run.further_cancelled`` where the user interrupted that. ``rooms``: of so many hidden
    places the room is searched for. Raises what ``execute`` raises."""
    if known.run.cancelled or known.run.further_cancelled or known.run.failure:
        return known
    run = known.run.model_copy(update={"further_cancelled": True})
    try:
        question, result, surveys = _surveyed(question, known)
    except KeyboardInterrupt:
        return known.model_copy(update={"run": run})
    lines = source_lines(result, surveys)
    # The times of an engine's phases are the hardware profile's, not its own.
    places: list[Place] = [*lines, *(phases(surveys, question.hardware) if question.engine is None else ())]
    gains = Gains(question, figures(result, surveys), notice)
    try:
        with spread(len(places), known.run.wall_s, known.run.import_s) as each:
            # First the change that gains most.
            gains.ask([(x, "half" if isinstance(x, str) else "absent") for x in places], each)
            shown = [line for line in lines if gains.shows(line)]
            milder: list[tuple[Place, Change]] = [(line, "no wait") for line in shown if line.waits]
            gains.ask([*milder, *((line, "pinned") for line in shown if line.pinnable)], each)
            if any(line.orders for line in shown):
                gains.needed = _needed(question)
            gains.search([place for place in places if gains.hides(place)][:rooms], each)
        run = known.run
    except KeyboardInterrupt:
        pass
    return known.model_copy(update={"worth": gains.part(), "run": run})


def _needed(question: Resolved) -> set[LinePlace]:
    """The lines whose order the run needs, which a run that is watched for hazards finds."""
    watched = whole(execute(question, Options(device="vgpu", hazards=True)))
    return {(row.site.file, row.site.line) for row in watched.ordering if row.needed}


def _surveyed(question: Resolved, known: Result) -> tuple[Resolved, Result, list[LineSurvey]]:
    """The question, without values where that leaves all metrics as they are, its result once more, and the surveys of
    its ranks."""
    bare = without_values(question)
    for asked in (question,) if bare is None else (bare, question):
        surveys = [LineSurvey() for _ in range(asked.scenario.engine.ranks)]
        result = whole(execute(asked, Options(device="vgpu"), extra_sinks=surveys))
        if result.metrics == known.metrics:
            break
    return asked, result, surveys


class Gains:
    """The trials that have ended, by place. ``needed``: lines without which two accesses would have no order."""

    def __init__(self, question: Resolved, base: Figures, notice: Notice) -> None:
        self._question = question
        self._base = base
        self._notice = notice
        self._found: dict[Place, dict[Change, Figures]] = {}
        self._rooms: dict[Place, Room] = {}
        self.needed: Collection[LinePlace] = ()

    def ask(self, asked: Sequence[tuple[Place, Change]], each: MapFunction) -> None:
        trials = each(partial(tried, self._question), asked)
        ended = self._reported("counterfactual runs", trials, len(asked))
        for (place, change), found in zip(asked, ended, strict=True):
            self._found.setdefault(place, {})[change] = found

    def search(self, places: Sequence[Place], each: MapFunction) -> None:
        """Find out how much longer hidden places could take."""
        searches = each(partial(room, self._question, self._base), places)
        ended = self._reported("room of hidden lines and phases", searches, len(places))
        for place, found in zip(places, ended, strict=True):
            self._rooms[place] = found

    def _reported(self, what: str, ended: Iterable[T], count: int) -> Iterator[T]:
        for number, found in enumerate(ended, start=1):
            yield found  # which is kept where the notice is interrupted
            self._notice(f"{what}: {number} of {count}")

    def hides(self, place: Place) -> bool:
        """Whether nothing is to be gained from the place."""
        return not self.shows(place) and not any(
            trial.void(self._base) for trial in self._found[place].values()
        )

    def shows(self, place: Place) -> bool:
        """Whether some figure gains."""
        found = self._found[place].values()
        return any(self._base.is_beaten_by(trial) for trial in found if not trial.void(self._base))

    def part(self) -> WorthPart:
        rows = [self._row(place, *one) for place, trials in self._found.items() for one in trials.items()]
        return WorthPart(base=self._base.numbers(), rows=tuple(sorted(rows, key=_rank)))

    def _row(self, place: Place, change: Change, trial: Figures) -> WorthRow:
        base = self._base
        where: dict[str, Any]
        if isinstance(place, str):
            where = {"phase": place, "what": "host phase"}
        else:
            where = {"site": place.site, "what": ", ".join(place.what), "kinds": tuple(sorted(place.kinds))}
            where["needed"] = place.orders and (place.site.file, place.site.line) in self.needed
        if void := trial.void(base):
            return WorthRow(**where, change=change, abstained=void)
        before, after = base.output_throughput, trial.output_throughput
        throughput = None if not before or after is None else percent(before, after)
        step = None if throughput is None or base.step_us is None else base.step_us / (1 + throughput / 100)
        return WorthRow(
            **where,
            change=change,
            output_throughput_pct=throughput,
            ttft_ms=_difference(base.ttft_ms, trial.ttft_ms),
            tpot_ms=_difference(base.tpot_ms, trial.tpot_ms),
            step_us=_difference(base.step_us, step),
            idle_us_per_step=_difference(base.forward_idle_us_per_step, trial.forward_idle_us_per_step),
            hidden=self.hides(place),
            room_us=self._rooms.get(place),
        )


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else b - a


def _rank(row: WorthRow) -> tuple[bool, bool, bool, bool, float, float, float, float]:
    """Largest gain first, then those of needed lines, then rows without figures, then hidden ones, of which those with
    a room first."""
    return (
        row.hidden,
        bool(row.abstained),
        row.needed,
        row.room_us is None,
        -(row.output_throughput_pct or 0.0),
        row.tpot_ms or 0.0,
        row.ttft_ms or 0.0,
        row.idle_us_per_step or 0.0,
    )


class WorthError(ValueError):
    """Counterfactual runs would not be the same run but for one thing."""


def require_changeable(question: Resolved, options: Options) -> None:
    """Raises WorthError where counterfactual runs would not be the same run but for one thing."""
    if reason := unrepeatable(question, options):
        raise WorthError(f"worth: {reason}")


def require_sides(question: Question | None, a: SideSpec, b: SideSpec) -> None:
    """Raises WorthError where the lines of neither side can be changed."""
    if question is None or a.stored or b.stored:
        raise WorthError("worth: stored results cannot be run again")
    asked = [found for spec in (a, b) if (found := _resolved(question, spec, None))]
    if not asked:
        raise WorthError("worth: lines of a git: side cannot be changed: leave one side to the working tree")
    for found in asked:
        require_changeable(found, Options(device="vgpu"))


def _resolved(question: Question, spec: SideSpec, seed: int | None) -> Resolved | None:
    if spec.ref is not None:
        return None
    return resolved_for(question, TrialRequest(spec.overrides, seed, device="vgpu", engine=spec.engine))


def compared_with_worth(
    found: Comparison, question: Question, a: SideSpec, b: SideSpec, notice: Notice
) -> Comparison:
    """The comparison with what the differing lines are worth in the first seed. Raises what ``execute`` raises."""
    side_a, side_b = (
        (_resolved(question, spec, results[0].scenario.seed), results[0])
        for spec, results in zip((a, b), found.trials.results, strict=True)
    )
    return replace(found, lines=with_worth(found.lines, side_a, side_b, notice))


def worth_of_rungs(question: Resolved, rungs: Sequence[Result], notice: Notice) -> list[Sequence[LineEffect]]:
    """What the lines are worth in which each rung of a ladder differs from the one before it, where their throughputs
    differ by as much as is of interest."""
    found: list[Sequence[LineEffect]] = [()]
    for before, after in pairwise(zip(map(question.with_relay, question.relays), rungs, strict=False)):
        asked: Sequence[LineEffect] = ()
        x, y = (value_of(result, "output_throughput") for _, result in (before, after))
        if x and y and abs(percent(x, y)) >= INTEREST:
            asked = with_worth(lines(before[1:], after[1:]), before, after, notice)
        found.append([line for line in asked if line.a != line.b])
    return found


def with_worth(found: Sequence[LineEffect], a: Asked, b: Asked, notice: Notice) -> list[LineEffect]:
    """The lines, those that differ with the part of B's throughput against A's that each alone accounts for, in
    percent: what A gains without the line, less what B gains without it."""
    sited = [(line, line_identity(line.site)) for line in found if line.site]
    differing = {identity for line, identity in sited if line.a != line.b}
    on_a, on_b = (
        {identity for line, identity in sited if line.a},
        {identity for line, identity in sited if line.b},
    )
    without_a = dict.fromkeys(differing - on_a, 1.0) | _without(a, differing & on_a, notice)
    without_b = dict.fromkeys(differing - on_b, 1.0) | _without(b, differing & on_b, notice)
    worth = {
        identity: 100 * (without_a[identity] / without_b[identity] - 1)
        for identity in without_a.keys() & without_b.keys()
    }
    return [
        line._replace(worth_pct=worth.get(line_identity(line.site)))
        if line.a != line.b and line.site
        else line
        for line in found
    ]


def _without(side: Asked, asked: Collection[LineIdentity], notice: Notice) -> dict[LineIdentity, float]:
    """The factor by which the throughput of the side's run rises without each of the source lines alone. Lines without
    which the run would not do the same work are left out. Raises what ``execute`` raises."""
    question, known = side
    if question is None or not asked:
        return {}
    question, result, surveys = _surveyed(question, known)
    lines = [line for line in source_lines(result, surveys) if line_identity(line.site) in asked]
    gains = Gains(question, figures(result, surveys), notice)
    with spread(len(lines), known.run.wall_s, known.run.import_s) as each:
        gains.ask([(line, "absent") for line in lines], each)
    factors: dict[LineIdentity, float] = {}
    for row in gains.part().rows:
        if row.site and row.output_throughput_pct is not None:
            identity = line_identity(row.site)  # which equal statements of a function have in common
            factors[identity] = factors.get(identity, 1.0) * (1 + row.output_throughput_pct / 100)
    return factors
