"""The verdict on the runs of two sides: on their tokens, then on engagement, then on performance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from ..record.result import HazardFinding
from . import effects, gates
from .draws import firmness
from .effects import MetricValue, table
from .engagement import THRESHOLD, StepEngagement, engagement, from_totals, total
from .gates import Gate, GateOutcome
from .likeness import BATCHING, ScenarioDifference, engine_differences, unlike_environments
from .reasons import Reason
from .statistics import percent
from .trials import NOT_DRAWN, DrawnRuns, Trials
from .verdict import MIN_EFFECT, Judgement, Verdict, corrected, judge_blocks, judge_seeds, judge_unpaired

# The verdict on a change is the verdict on these, unless gates name others.
HEADLINE: Final = ("output_throughput", "ttft_ms", "tpot_ms")
# Captures have no requests.
CAPTURED_HEADLINE: Final = ("step_ms", "forward_idle_us_per_step")

# Percent. Gains and losses that are smaller are no trade-off.
INTEREST: Final = 1.0

Overall = Literal["better", "worse", "trade-off", "no change", "inconclusive"]


@dataclass(frozen=True, slots=True)
class VerdictRules:
    """Bounds are in percent. ``headline`` are the metrics that the verdict is about where no gate names any; captures
    have their own."""

    min_effect: float = MIN_EFFECT
    min_engagement: float = THRESHOLD
    allow_divergence: bool = False
    gates: tuple[Gate, ...] = ()
    undecided_passes: bool = False  # of gates
    inconclusive_fails: bool = False  # no verdict, or none on some gate
    headline: tuple[str, ...] = HEADLINE


@dataclass(frozen=True, slots=True)
class Comparison:
    """``headline`` are the metrics that the verdict is about."""

    trials: Trials
    rules: VerdictRules
    engagement: StepEngagement
    metrics: Mapping[str, Judgement]
    headline: tuple[str, ...]
    verdict: Overall
    reasons: tuple[Reason, ...]
    counts: Sequence[effects.CounterEffect]
    added: Sequence[effects.AddedCount]
    lines: Sequence[effects.LineEffect]
    hazards: Sequence[HazardFinding]
    idle: Sequence[Mapping[str, Any]]
    gates: tuple[GateOutcome, ...]
    engine: tuple[ScenarioDifference, ...]
    environment: tuple[ScenarioDifference, ...]
    drawn: DrawnRuns

    @property
    def broken(self) -> bool:
        """Whether a gate did not pass, the tokens differ although that is not allowed, B has a new hazard, or there is
        no verdict although one is required."""
        forbidden = self.trials.tokens == "different" and not self.rules.allow_divergence
        allowed = {"passed", "undecided"} if self.rules.undecided_passes else {"passed"}
        gated = any(gate.outcome not in allowed for gate in self.gates)
        return forbidden or bool(self.hazards) or gated or (self.rules.inconclusive_fails and self.undecided)

    @property
    def undecided(self) -> bool:
        """Whether there is no verdict, or none on some gate."""
        return self.verdict == "inconclusive" or any(gate.outcome == "undecided" for gate in self.gates)


def judge(trials: Trials, rules: VerdictRules = VerdictRules(), drawn: DrawnRuns = NOT_DRAWN) -> Comparison:
    results_a, results_b = trials.results
    engaged = total(
        from_totals(a.result, b.result)
        if a.steps is None or b.steps is None
        else engagement(a.steps, b.steps)
        for a, b in zip(trials.a, trials.b, strict=False)
    )
    others = (unlike_environments(results_a[0], result) for result in (*results_b, *results_a))
    environment = next(filter(None, others), ())
    moved = bool(environment) and trials.design != "seeds"
    gated = tuple(dict.fromkeys(gate.name for gate in rules.gates if not (gate.place or gate.added)))
    captured = results_a[0].labels.capture is not None
    headline = gated or (CAPTURED_HEADLINE if captured else rules.headline)
    found = _metrics(trials, rules, headline=headline)
    measured = trials.design == "blocks"
    shown = shows_change(found, headline, undecided=measured) and (measured or trials.a[0].exact)
    voids = _voids(trials, rules, engaged=engaged, moved=moved, shown=shown)
    if voids:
        found = {name: judged.void(*voids) for name, judged in found.items()}
    metrics, added = _under(drawn, found, headline), effects.added(results_a, results_b)
    verdict, reasons = overall([metrics[name] for name in headline if name in metrics], voids)
    return Comparison(
        trials=trials,
        rules=rules,
        engagement=engaged,
        metrics=metrics,
        headline=headline,
        verdict=verdict,
        reasons=reasons,
        counts=effects.counts(results_a, results_b),
        added=added,
        lines=effects.lines(results_a, results_b),
        hazards=effects.new_hazards(results_a, results_b),
        idle=effects.idle(results_a, results_b),
        gates=tuple(gates.check(gate, metrics, a=results_a, b=results_b, more=added) for gate in rules.gates),
        engine=engine_differences(results_a[0], results_b[0]),
        environment=environment,
        drawn=drawn,
    )


def overall(found: Iterable[Judgement], voids: Sequence[Reason] = ()) -> tuple[Overall, tuple[Reason, ...]]:
    """The verdict on several metrics together; a trade-off where some are better and some worse, each by at least the
    size of interest."""
    found = tuple(found)
    verdicts: set[Verdict] = {judgement.verdict for judgement in found}
    reasons = dict.fromkeys(reason for judgement in found for reason in judgement.reasons)
    if voids:
        return "inconclusive", tuple(voids)
    opposed: set[Verdict] = {"better", "worse"}
    if opposed <= verdicts:
        large = {judgement.verdict for judgement in found if abs(judgement.delta) >= INTEREST} & opposed
        if large == opposed:
            return "trade-off", ()
        verdicts = (verdicts - opposed) | (large or {"no change"})
    for verdict in ("better", "worse"):
        if verdict in verdicts:
            return verdict, ()
    return ("no change", ()) if verdicts == {"no change"} else ("inconclusive", tuple(reasons))


def _voids(
    trials: Trials, rules: VerdictRules, *, engaged: StepEngagement, moved: bool, shown: bool
) -> tuple[Reason, ...]:
    """The reasons that forbid any verdict on performance. ``shown``: whether the metrics show a change."""
    first = trials.a[0].result.labels
    return tuple(
        reason
        for reason, holds in (
            (Reason.OUTPUT_DIFF, trials.tokens == "different" and not rules.allow_divergence),
            (Reason.NOT_ENGAGED, _idle_change(trials, rules, engaged, shown=shown)),
            # The times of both captures include the cost of the tool, so that they can be compared with each other.
            (Reason.PROFILED, first.profiled and first.capture is None),
            (Reason.CONFIG_DIFF, moved),
        )
        if holds
    )


def _idle_change(trials: Trials, rules: VerdictRules, engaged: StepEngagement, *, shown: bool) -> bool:
    """Whether too few steps differ by their operations, and nothing else shows a change. Other tokens show one; times
    that repeat exactly or are measured in turns show one of order, waits, batches or host work. Undecided times that
    are measured in turns count as shown, since more pairs may decide them; times of separate captures do not. A change
    of batching has other batches in any case."""
    if engaged.basis == "nothing" or engaged.percent >= rules.min_engagement:
        return False
    if shown or trials.tokens == "different":
        return False
    if not engaged.engaged.differing and not same_times(trials):
        return False
    differences = engine_differences(trials.a[0].result, trials.b[0].result)
    return engaged.basis != "kinds" or all(difference.key not in BATCHING for difference in differences)


def shows_change(
    metrics: Mapping[str, Judgement], headline: Sequence[str], *, undecided: bool = False
) -> bool:
    """Whether a metric that the verdict is about is better or worse, or, if asked, ``undecided``."""
    same = ("no change",) if undecided else ("no change", "inconclusive")
    return any(metrics[name].verdict not in same for name in headline if name in metrics)


def same_times(trials: Trials) -> bool:
    """Whether all metrics of all runs are equal, or differ by chance where times are measured."""
    pairs = zip(trials.a, trials.b, strict=False)
    return not trials.a[0].exact or all(a.result.metrics == b.result.metrics for a, b in pairs)


def _metrics(trials: Trials, rules: VerdictRules, *, headline: Sequence[str]) -> dict[str, Judgement]:
    tables = [table(results, headline) for results in trials.results]
    names = [name for name in tables[0] if name in tables[1]]
    found = {name: _judged(trials, rules, tables[0][name], tables[1][name]) for name in names}
    return corrected(found, headline)


def _under(
    drawn: DrawnRuns, metrics: Mapping[str, Judgement], headline: Sequence[str]
) -> dict[str, Judgement]:
    """The metrics that the verdict is about, held against their effects under the draws."""
    tables = [table(results, headline) for results in (drawn.a, drawn.b)]
    found = dict(metrics)
    for name in headline:
        if name not in metrics or not all(name in values for values in tables):
            continue
        pairs = zip(*(values[name] for values in tables), strict=True)
        effects = [percent(a.value, b.value) for a, b in pairs]
        found[name] = metrics[name].drawn(firmness(metrics[name].delta, effects, drawn.draws))
    return found


def _judged(
    trials: Trials, rules: VerdictRules, a: Sequence[MetricValue], b: Sequence[MetricValue]
) -> Judgement:
    values_a, values_b = [x.value for x in a], [x.value for x in b]
    direction = a[0].direction
    if trials.design == "seeds":
        found = judge_seeds(
            values_a, values_b, direction, min_effect=rules.min_effect, one_run=trials.one_run
        )
    elif trials.design == "stored":
        found = judge_unpaired(values_a, values_b, direction, min_effect=rules.min_effect)
    else:
        found = judge_blocks(trials.blocks(values_a, values_b), direction, min_effect=rules.min_effect)
    return replace(found, unit=a[0].unit)
