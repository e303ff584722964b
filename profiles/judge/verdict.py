"""The verdict on one metric: better, worse, no change, or inconclusive with the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from typing import Final, Literal

from ..record.definitions import Direction
from ..record.result import Abstained
from . import statistics
from .draws import Firmness
from .reasons import Reason
from .statistics import Interval, abba, percent

Verdict = Literal["better", "worse", "no change", "inconclusive"]

MIN_EFFECT: Final = 0.5  # percent
MIN_SEEDS: Final = 5
# Of 7 workloads: with fewer no p-value of a signed-rank test survives the correction for three metrics.
MIN_PAIRS: Final = 14
MIN_STORED: Final = 6  # runs of each side
DEFAULT_PAIRS: Final = 20
ALPHA: Final = 0.05
RESOLVE: Final = 1.0  # percent that the power hint is about, at least twice the minimum effect


@dataclass(frozen=True, slots=True)
class Judgement:
    """One metric: all values of both sides, and what they say. Effects, intervals, floor and slot-order effect are in
    percent of A. ``n`` counts pairs or seeds, or the smaller side where nothing is paired. ``needed`` is the number of
    them that a verdict needs, if they spread as these do; it would resolve ``resolve`` percent where that is given."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    direction: Direction
    delta: float
    interval: Interval
    n: int
    test: str
    verdict: Verdict = "no change"
    reasons: tuple[Reason, ...] = ()
    min_effect: float = MIN_EFFECT
    p_value: float | None = None
    floor: float | None = None
    slot: float | None = None
    drift: float | None = None
    needed: int | None = None
    resolve: float | None = None
    firmness: Firmness | Abstained | None = None  # where the hardware's constants were drawn
    unit: str = ""

    def drawn(self, found: Firmness | Abstained) -> Judgement:
        """Return the judgement with its firmness over draws of the hardware's constants: a verdict whose sign, or for
        "no change" whose size, does not hold within the ranges is none."""
        judged = replace(self, firmness=found)
        if isinstance(found, Abstained):
            doubted = True
        elif self.verdict == "no change":
            doubted = found.high >= self.min_effect or found.low <= -self.min_effect
        else:
            doubted = found.flips or not found.holding
        return judged.void(Reason.CONSTANTS) if doubted and self.verdict != "inconclusive" else judged

    def sided(self) -> Judgement:
        """The same numbers with the verdict on the sign of the effect."""
        better = (self.delta > 0) == (self.direction == "higher")
        return replace(self, verdict="better" if better else "worse")

    def void(self, *reasons: Reason) -> Judgement:
        """The same numbers without a verdict."""
        known = tuple(reason for reason in self.reasons if reason not in reasons)
        return replace(self, verdict="inconclusive", reasons=(*reasons, *known))


def judge_seeds(
    a: Sequence[float],
    b: Sequence[float],
    direction: Direction,
    *,
    min_effect: float = MIN_EFFECT,
    one_run: bool = False,
) -> Judgement:
    """Values that repeat exactly, one per workload seed. Microseconds change batching under random arrivals, so that
    the change of a seed is a sample of the changes of all seeds, unless all seeds are ``one_run``."""
    differences = [percent(x, y) for x, y in zip(a, b, strict=True)]
    delta, interval = median(differences), statistics.order_interval(differences)
    test = "exact in one run" if one_run else "t of the changes over seeds, interval of order statistics"
    found = Judgement(tuple(a), tuple(b), direction, delta, interval, len(a), test, min_effect=min_effect)
    if found.a == found.b:
        return found
    if found.n >= MIN_SEEDS and not one_run:
        found = replace(found, p_value=statistics.one_sample(a, b))
    return _settled(found, least=1 if one_run else MIN_SEEDS)


def judge_blocks(
    blocks: Sequence[float], direction: Direction, *, min_effect: float = MIN_EFFECT
) -> Judgement:
    """Measured values of 4 x n blocks in the order of ``abba``, four of each workload."""
    pairs, same = statistics.paired(blocks), statistics.same_side(blocks)
    order = abba(len(blocks) // 2)
    a, b = (tuple(x for x, s in zip(blocks, order, strict=True) if s == side) for side in "ab")
    test = "Wilcoxon signed-rank and bootstrap over workloads"
    if not all(map(isfinite, (*pairs.differences, *same.differences))):
        delta = percent(median(a), median(b))
        unbounded = Judgement(
            a, b, direction, delta, statistics.UNBOUNDED, pairs.n, test, min_effect=min_effect
        )
        return unbounded.void(Reason.OF_ZERO)
    effects, slots = statistics.of_workloads(pairs)
    (delta, interval), (slot, slots_between) = statistics.typical(effects), statistics.typical(slots)
    departures = statistics.departures(blocks)
    found = replace(
        Judgement(a, b, direction, delta, interval, pairs.n, test, min_effect=min_effect),
        p_value=statistics.wilcoxon(effects),
        floor=abs(float(median(statistics.centred(same)))) if same.n else 0.0,
        slot=slot,
        drift=statistics.drift(departures),
    )
    reasons = [
        (Reason.WARMUP_RAMP, statistics.ramp(departures, min_effect=min_effect)),
        (Reason.DRIFT, abs(found.drift or 0.0) > statistics.DRIFT_LIMIT),
        # The slot-order effect is significantly larger than the effect that it was separated from.
        (Reason.ORDER_EFFECT, slots_between.beyond(max(abs(delta), min_effect))),
    ]
    return _settled(found, [reason for reason, holds in reasons if holds], least=MIN_PAIRS)


def judge_unpaired(
    a: Sequence[float], b: Sequence[float], direction: Direction, *, min_effect: float = MIN_EFFECT
) -> Judgement:
    """Measured values of two stored sets. They are not interleaved, so that drift counts as effect."""
    delta, interval = statistics.unpaired(a, b)
    n, test = min(len(a), len(b)), "Mann-Whitney U, unpaired: drift between the runs counts as effect"
    found = Judgement(tuple(a), tuple(b), direction, delta, interval, n, test, min_effect=min_effect)
    if interval == statistics.UNBOUNDED:
        return found.void(Reason.OF_ZERO)
    found = replace(found, p_value=statistics.mann_whitney(a, b))
    return _settled(found, least=MIN_STORED)


def corrected(judged: Mapping[str, Judgement], gated: Sequence[str]) -> dict[str, Judgement]:
    """Holm's correction over the gated metrics: findings that do not survive it become inconclusive."""
    found = dict(judged)
    names = [name for name in gated if name in judged and judged[name].p_value is not None]
    adjusted = statistics.holm([judged[name].p_value or 0.0 for name in names])
    for name, p_value in zip(names, adjusted, strict=True):
        one = replace(judged[name], p_value=p_value)
        found[name] = _undecided(one) if one.verdict in ("better", "worse") and p_value > ALPHA else one
    return found


def _settled(found: Judgement, reasons: Sequence[Reason] = (), *, least: int) -> Judgement:
    """The judgement with its verdict; none for a reason, or with fewer than ``least`` pairs or runs."""
    band = max(found.min_effect, found.floor or 0.0)
    if found.n < least:
        return replace(found.void(Reason.LOW_N, *reasons), needed=least)
    if reasons:
        return found.void(*reasons)
    if found.interval.beyond(band) and (found.p_value or 0.0) <= ALPHA:
        return found.sided()
    return found if found.interval.within(found.min_effect) else _undecided(found)


def _undecided(found: Judgement) -> Judgement:
    """The judgement without a verdict, and with the number of pairs or seeds that would allow one."""
    resolve = max(RESOLVE, 2 * found.min_effect)
    needed = statistics.pairs_needed(found.interval, n=found.n, resolve=resolve, band=found.min_effect)
    more = needed is not None and needed > found.n
    undecided = found.void(
        Reason.LOW_N if isfinite(found.interval.high - found.interval.low) else Reason.OF_ZERO
    )
    return replace(undecided, needed=needed, resolve=resolve) if more else undecided
