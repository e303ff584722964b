"""Signs that a measured run cannot be trusted: warm-up, drift, and an effect of the order of blocks.

Works on blocks in the order in which they ran, each side scaled to its own median.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from .pairs import Effect, Floats, abba

DRIFT_LIMIT: Final = 10.0  # percent over the run, above which no verdict is given
LEADING: Final = 2  # blocks at the start that a warm-up ramp affects
SUSPICIOUS: Final = 4.0  # standard errors
SURE: Final = 0.01


def levelled(blocks: Sequence[float]) -> Floats:
    """Percent by which each block departs from its side's median."""
    values = np.asarray(blocks, dtype=float)
    sides = np.array(abba(len(blocks) // 2))
    departures = np.zeros(len(values))
    for side in ("a", "b"):
        mine = values[sides == side]
        centre = float(np.median(mine))
        if centre:
            departures[sides == side] = 100 * (mine - centre) / abs(centre)
    return departures


def drift(departures: Floats) -> float:
    """Change over the whole run in percent, by the median slope; 0 unless the rank correlation is significant."""
    from scipy import stats

    time = np.arange(len(departures))
    if np.ptp(departures) == 0 or float(stats.spearmanr(time, departures).pvalue) > SURE:
        return 0.0
    return float(stats.theilslopes(departures, time).slope) * (len(departures) - 1)


def ramp(departures: Floats, *, min_effect: float) -> bool:
    """Whether the first blocks all lie on one side, further out than the spread of the later ones explains."""
    first, rest = departures[:LEADING], departures[LEADING:]
    if len(rest) < 2 * LEADING or not (np.all(first > 0) or np.all(first < 0)):
        return False
    from scipy import stats

    spread = float(stats.median_abs_deviation(rest, scale="normal")) / LEADING**0.5
    distance = abs(float(np.mean(first) - np.median(rest)))
    return distance > max(SUSPICIOUS * spread, min_effect)


def order_dominates(effect: Effect, *, min_effect: float) -> bool:
    """Whether the slot-order effect is significantly larger than the effect that it was separated from."""
    return effect.slot_interval.beyond(max(abs(effect.median), min_effect))
