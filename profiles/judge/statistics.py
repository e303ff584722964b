"""Statistics of a comparison: effects, tests, intervals, sample sizes, and signs that a run cannot be trusted.

Pure functions of numbers.

Four blocks run one workload, as A B B A in the first half of the workloads and as B A A B in the second; a pair is two
neighbours, one of each side. All effects are in percent of A::

    workload  ------1------ | ------n------
    block     A   B   B   A | B   A   A   B
    pair      --1--   --2-- | --3--   --4--      of one pair, the second block may be systematically slower
    same          `-B-'     |     `-A-'          neighbours of one side: what A against A looks like in this run

The effect in a workload is what its two pairs have in common. The slot-order effect is what changes its sign with the
order; a steady drift has the same form. Workloads differ in their effects and are independent of each other, so that
intervals and tests are over workloads. Noise, drift and a ramp are seen within workloads alone, because blocks of two
workloads differ by what these are. Each side is the first of a workload as often as the other, and as often behind
either side, so that what a new workload or the side before costs is no effect.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from statistics import NormalDist
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Side = Literal["a", "b"]
Floats = NDArray[np.float64]

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2000
POWER: Final = 0.8

DRIFT_LIMIT: Final = 10.0  # percent over the run, above which no verdict is given
LEADING: Final = 2  # blocks at the start that a warm-up ramp affects
SUSPICIOUS: Final = 4.0  # standard errors
SURE: Final = 0.01


class Interval(NamedTuple):
    """Percent, both ends included."""

    low: float
    high: float

    def beyond(self, band: float) -> bool:
        """Whether all of it lies on one side of [-band, band]."""
        return self.low > band or self.high < -band

    def within(self, band: float) -> bool:
        return -band <= self.low and self.high <= band


UNBOUNDED: Final = Interval(-math.inf, math.inf)  # of percentages of 0


class PairedDifferences(NamedTuple):
    """``differences`` [n] in percent of A; ``order`` [n] is 1 where A ran first, -1 where B did."""

    differences: Floats
    order: Floats

    @property
    def n(self) -> int:
        return len(self.differences)


class Effect(NamedTuple):
    """``slot`` is the excess of the second block of a pair over the first, steady drift included."""

    median: float
    slot: float
    interval: Interval
    slot_interval: Interval


def abba(pairs: int) -> tuple[Side, ...]:
    """The order of 2 x pairs blocks."""
    workloads = (pairs + 1) // 2
    a_first: tuple[Side, ...] = ("a", "b", "b", "a")
    b_first: tuple[Side, ...] = ("b", "a", "a", "b")
    half = (workloads + 1) // 2
    return (a_first * half + b_first * (workloads - half))[: 2 * pairs]


def percent(a: float, b: float) -> float:
    """By how much ``b`` exceeds ``a``; infinite, with the sign of the change, where a is 0 and b is not."""
    if a == b:
        return 0.0
    return 100 * (b - a) / abs(a) if a else math.copysign(math.inf, b)


def paired(blocks: Sequence[float]) -> PairedDifferences:
    """From 2 x n values in the order of ``abba``."""
    order = np.where(np.array(abba(len(blocks) // 2))[::2] == "a", 1.0, -1.0)
    pairs = np.asarray(blocks, dtype=float).reshape(-1, 2)
    first, second = pairs[:, 0], pairs[:, 1]
    a, b = np.where(order > 0, first, second), np.where(order > 0, second, first)
    return PairedDifferences(np.array([percent(x, y) for x, y in zip(a, b, strict=True)]), order)


def same_side(blocks: Sequence[float]) -> PairedDifferences:
    """A against A, from 4 x n values: neighbouring blocks of one side as pairs, labelled A and B in turn."""
    values = np.asarray(blocks, dtype=float).reshape(-1, 4)[:, 1:3]
    order = np.where(np.arange(len(values)) % 2 == 0, 1.0, -1.0)
    changes = np.array([percent(x, y) for x, y in values])
    return PairedDifferences(changes * order, order)


def of_workloads(pairs: PairedDifferences) -> tuple[Floats, Floats]:
    """The effect [n] and the slot-order effect [n] of each workload, from 2 x n pairs."""
    first, second = pairs.differences.reshape(-1, 2).T
    return (first + second) / 2, pairs.order[::2] * (first - second) / 2


def typical(values: Floats) -> tuple[float, Interval]:
    """The median of independent values [n], with its interval by bootstrap."""
    n = len(values)
    drawn = values[np.random.default_rng(0).integers(n, size=(RESAMPLES, n))]
    return float(np.median(values)), quantiles(np.median(drawn, axis=1))


def estimate(pairs: PairedDifferences) -> Effect:
    """The effect and the slot-order effect in one workload, with intervals by bootstrap over pairs of each order."""
    median, slot = _estimates(pairs.differences[None], pairs.order)
    drawn = pairs.differences[_resampled(pairs.order)]
    medians, slots = _estimates(drawn, pairs.order)
    return Effect(float(median[0]), float(slot[0]), quantiles(medians), quantiles(slots))


def centred(pairs: PairedDifferences) -> Floats:
    """The differences [n] without the slot-order effect."""
    _, slot = _estimates(pairs.differences[None], pairs.order)
    return np.asarray(pairs.differences - pairs.order * slot[0])


def _estimates(differences: Floats, order: Floats) -> tuple[Floats, Floats]:
    """Median and slot-order effect [r] of r samples [r, n]."""
    slot = np.zeros(len(differences))
    if (order > 0).any() and (order < 0).any():
        ahead, behind = differences[:, order > 0], differences[:, order < 0]
        slot = (np.median(ahead, axis=1) - np.median(behind, axis=1)) / 2
    return np.median(differences - order * slot[:, None], axis=1), slot


def _resampled(order: Floats) -> NDArray[np.int64]:
    """Indices [RESAMPLES, n]; each pair is replaced by one of the same order."""
    rng = np.random.default_rng(0)
    drawn = np.empty((RESAMPLES, len(order)), dtype=np.int64)
    for sign in (1.0, -1.0):
        members = np.flatnonzero(order == sign)
        if len(members):
            drawn[:, members] = rng.choice(members, size=(RESAMPLES, len(members)))
    return drawn


def quantiles(samples: Floats) -> Interval:
    """Between which ``CONFIDENCE`` of the samples lie."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples, (tail, 1 - tail))
    return Interval(float(low), float(high))


def wilcoxon(differences: Floats) -> float:
    """Two-sided p of the signed-rank test, exact up to 50 differences without ties."""
    from scipy import stats

    nonzero = differences[differences != 0]
    return float(stats.wilcoxon(nonzero).pvalue) if len(nonzero) else 1.0


def one_sample(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of Student's test that the changes of pairs have the mean 0; changes are in parts of the mean of both
    values, which are finite where one of them is 0."""
    from scipy import stats

    pairs = np.array([a, b], dtype=float)
    changes = np.diff(pairs, axis=0)[0] / np.maximum(np.abs(pairs).mean(axis=0), sys.float_info.min)
    error = changes.std(ddof=1) / len(changes) ** 0.5
    with np.errstate(divide="ignore"):
        return float(2 * stats.t.sf(abs(np.divide(changes.mean(), error)), len(changes) - 1))


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p for values that were not measured in pairs."""
    from scipy import stats

    return float(stats.mannwhitneyu(a, b).pvalue) if len({*a, *b}) > 1 else 1.0  # NaN since SciPy 1.18


def unpaired(a: Sequence[float], b: Sequence[float]) -> tuple[float, Interval]:
    """Difference of the medians in percent of A's, with its bootstrap interval; UNBOUNDED where a median may be 0."""
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(x, size=(RESAMPLES, len(x))), axis=1) for x in (a, b)]
    effects = np.array([percent(x, y) for x, y in zip(*medians, strict=True)])
    interval = quantiles(effects) if np.isfinite(effects).all() else UNBOUNDED
    return percent(float(np.median(a)), float(np.median(b))), interval


def order_interval(values: Sequence[float]) -> Interval:
    """Distribution-free interval of the median from order statistics, of confidence 15/16: the whole range for five
    values, the 6th to the 15th for twenty."""
    ordered = sorted(values)
    n = len(ordered)
    tails = accumulate(2 * math.comb(n, k) / 2**n for k in range(n // 2))
    outer = max(sum(tail <= 1 / 16 for tail in tails) - 1, 0)
    return Interval(ordered[outer], ordered[n - 1 - outer])


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted by Holm's method, which bounds the chance of any false finding among them."""
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = worst
    return adjusted


def pairs_needed(interval: Interval, *, n: int, resolve: float, band: float) -> int | None:
    """Pairs with which a true effect of ``resolve`` percent is found in four of five runs. None where ``resolve`` is
    within ``band``, the effects that count as no change, or the interval has no finite width."""
    if resolve <= band or not math.isfinite(interval.high - interval.low):
        return None
    outer = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    sigma_now = (interval.high - interval.low) / 2 / outer
    reach = outer + NormalDist().inv_cdf(POWER)
    needed = math.ceil(n * (reach * sigma_now / (resolve - band)) ** 2)
    return max(needed + needed % 2, 2)  # whole ABBA blocks


def departures(blocks: Sequence[float]) -> Floats:
    """Percent [n, 4] by which each of 4 x n blocks departs from the other block of its side and workload."""
    values = np.asarray(blocks, dtype=float).reshape(-1, 4)
    others = values[:, ::-1]
    centres = np.abs(values + others) / 2
    found: Floats = np.divide(100 * (values - others), centres, out=np.zeros_like(values), where=centres > 0)
    return found


def drift(departures: Floats) -> float:
    """Change over the whole run in percent, by the median slope within workloads [n, 4]; 0 unless it is significant."""
    slopes = 0.1 * departures[:, 2] + 0.3 * departures[:, 3]  # least squares; the first two are the opposites
    return float(np.median(slopes)) * (departures.size - 1) if wilcoxon(slopes) <= SURE else 0.0


def ramp(departures: Floats, *, min_effect: float) -> bool:
    """Whether the first blocks all depart to one side, further than the spread of the later ones explains."""
    first, rest = departures.flat[:LEADING], departures.flat[LEADING:]
    if len(rest) < 2 * LEADING or not (np.all(first > 0) or np.all(first < 0)):
        return False
    from scipy import stats

    spread = float(stats.median_abs_deviation(rest, scale="normal")) / LEADING**0.5
    distance = abs(float(np.mean(first) - np.median(rest)))
    return distance > max(SUSPICIOUS * spread, min_effect)
