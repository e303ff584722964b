"""Statistical tests, intervals and sample sizes. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import NormalDist
from typing import Final

import numpy as np

from .pairs import CONFIDENCE, RESAMPLES, Floats, Interval, percent, quantiles

POWER: Final = 0.8


def wilcoxon(differences: Floats) -> float:
    """Two-sided p of the signed-rank test, exact up to 50 differences without ties."""
    from scipy import stats

    nonzero = differences[differences != 0]
    return float(stats.wilcoxon(nonzero).pvalue) if len(nonzero) else 1.0


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p for values that were not measured in pairs."""
    from scipy import stats

    return float(stats.mannwhitneyu(a, b).pvalue)


def unpaired(
    a: Sequence[float], b: Sequence[float], *, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[float, Interval]:
    """Difference of the medians in percent of A's, with its bootstrap interval."""
    rng = np.random.default_rng(seed)
    medians = [np.median(rng.choice(x, size=(RESAMPLES, len(x))), axis=1) for x in (a, b)]
    effects = 100 * (medians[1] - medians[0]) / np.abs(medians[0])
    return percent(float(np.median(a)), float(np.median(b))), quantiles(effects, confidence)


def order_interval(values: Sequence[float], *, confidence: float = 0.9375) -> Interval:
    """Distribution-free interval of the median from order statistics: the whole range for five values, the 6th to the
    15th for twenty."""
    ordered = sorted(values)
    n = len(ordered)
    tails = accumulate(2 * math.comb(n, k) / 2**n for k in range(n // 2))
    outer = max(sum(tail <= 1 - confidence for tail in tails) - 1, 0)
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
    within ``band``, the effects that count as no change."""
    if resolve <= band:
        return None
    outer = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    sigma_now = (interval.high - interval.low) / 2 / outer
    reach = outer + NormalDist().inv_cdf(POWER)
    needed = math.ceil(n * (reach * sigma_now / (resolve - band)) ** 2)
    return max(needed + needed % 2, 2)  # whole ABBA blocks
