"""Chunk sizes for which every chunk takes as long as the first one (upstream ``--enable-dynamic-chunking``).

A later chunk of a prompt attends to more tokens. Chunks of equal size therefore take longer and longer, and stages wait
for one another::

    equal sizes     |---|----|-----|------|          equal times    |----|----|----|----|-|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np

_SIGNIFICANT = 0.01  # share of the longest prompt's time
_GRAIN = 64  # tokens that a chunk is a multiple of, unless pages are larger


class Curve(NamedTuple):
    """The cost of n tokens from the start of a prompt, ns: ``square`` n^2 + ``linear`` n, besides a constant per
    forward. Both are positive, or both are zero if the measurements show no such curve."""

    square: float
    linear: float


def fit(lengths: Sequence[int], times: Sequence[int]) -> Curve:
    """Fit a curve by least squares to prompts of at least three ``lengths``, in rising order, that took ``times``, ns.
    If one of its terms is insignificant, both are zero."""
    fitted = np.polyfit(np.array(lengths, dtype=np.float64), np.array(times, dtype=np.float64), 2)
    square, linear = float(fitted[0]), float(fitted[1])
    shows = (
        square * lengths[-1] ** 2 > _SIGNIFICANT * times[-1]
        and linear * lengths[-1] > _SIGNIFICANT * times[-1]
    )
    return Curve(square, linear) if shows else Curve(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """``first`` is the size of a prompt's first chunk, in tokens. A later chunk is shortened by the share ``smooth`` of
    the difference to the size that would take equally long."""

    curve: Curve
    first: int
    smooth: float
    page_size: int

    def behind(self, tokens: int) -> int:
        """The size of a chunk that follows ``tokens`` tokens: x with T(tokens + x) - T(tokens) = T(first)."""
        square, linear = self.curve
        if square == 0:
            return self.first
        slope = linear + 2 * square * tokens
        wanted = square * self.first**2 + linear * self.first
        equal = (sqrt(slope**2 + 4 * square * wanted) - slope) / (2 * square)
        grain = max(_GRAIN, self.page_size)
        size = round(self.first + self.smooth * (equal - self.first)) // grain * grain
        return min(max(size, grain), self.first)
