"""Paired measurements and the effect that they show. Pure functions; depends on numpy only.

Blocks are run as A B B A A B B A ...; a pair is two neighbours, one of each side. All effects are in percent of A::

    block   A   B | B   A | A   B | B   A
    pair    --1-- | --2-- | --3-- | --4--      of one pair, the second block may be systematically slower
    same        `-B-'   `-A-'   `-B-'          neighbours of one side: what A against A looks like in this run

The effect is what all pairs have in common, whatever their order. The slot-order effect is what changes its sign with
the order; a steady drift has the same form. Both are estimated from the same pairs, and the latter is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Side = Literal["a", "b"]
Floats = NDArray[np.float64]

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2000


class Interval(NamedTuple):
    """Percent, both ends included."""

    low: float
    high: float

    def beyond(self, band: float) -> bool:
        """Whether all of it lies on one side of [-band, band]."""
        return self.low > band or self.high < -band

    def within(self, band: float) -> bool:
        return -band <= self.low and self.high <= band


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
    sides: list[Side] = []
    for pair in range(pairs):
        sides += ("a", "b") if pair % 2 == 0 else ("b", "a")
    return tuple(sides)


def percent(a: float, b: float) -> float:
    """By how much ``b`` exceeds ``a``; nan where a is 0 and b is not."""
    if a == b:
        return 0.0
    return 100 * (b - a) / abs(a) if a else math.nan


def paired(blocks: Sequence[float]) -> PairedDifferences:
    """From 2 x n values in the order of ``abba``."""
    order = np.where(np.arange(len(blocks) // 2) % 2 == 0, 1.0, -1.0)
    pairs = np.asarray(blocks, dtype=float).reshape(-1, 2)
    first, second = pairs[:, 0], pairs[:, 1]
    a, b = np.where(order > 0, first, second), np.where(order > 0, second, first)
    return PairedDifferences(np.array([percent(x, y) for x, y in zip(a, b, strict=True)]), order)


def same_side(blocks: Sequence[float]) -> PairedDifferences:
    """A against A: neighbouring blocks of one side as pairs, labelled A and B in turn."""
    values = np.asarray(blocks, dtype=float)[1:-1].reshape(-1, 2)
    order = np.where(np.arange(len(values)) % 2 == 0, 1.0, -1.0)
    changes = np.array([percent(x, y) for x, y in values])
    return PairedDifferences(changes * order, order)


def estimate(pairs: PairedDifferences, *, seed: int = 0, confidence: float = CONFIDENCE) -> Effect:
    """The effect and the slot-order effect, with intervals by bootstrap over pairs of each order."""
    rng = np.random.default_rng(seed)
    median, slot = _estimates(pairs.differences[None], pairs.order)
    drawn = pairs.differences[_resampled(pairs.order, rng)]
    medians, slots = _estimates(drawn, pairs.order)
    return Effect(
        float(median[0]), float(slot[0]), quantiles(medians, confidence), quantiles(slots, confidence)
    )


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


def _resampled(order: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    """Indices [RESAMPLES, n]; each pair is replaced by one of the same order."""
    drawn = np.empty((RESAMPLES, len(order)), dtype=np.int64)
    for sign in (1.0, -1.0):
        members = np.flatnonzero(order == sign)
        if len(members):
            drawn[:, members] = rng.choice(members, size=(RESAMPLES, len(members)))
    return drawn


def quantiles(samples: Floats, confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(samples, (tail, 1 - tail))
    return Interval(float(low), float(high))
