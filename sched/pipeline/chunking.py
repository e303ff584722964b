"""Chunks that all take a stage as long as the first one (upstream ``--enable-dynamic-chunking``).

A later chunk of a prompt attends to more, so that chunks of one size take longer and longer, and stages wait for one
another::

    equal sizes     |---|----|-----|------|          equal times    |----|----|----|----|-|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np

_LOST = 0.01  # of the longest prompt's time
_GRAIN = 64  # tokens that a chunk is a multiple of, where pages are no larger


class Curve(NamedTuple):
    """What n tokens from the start of a prompt cost: ``square`` n^2 + ``linear`` n, ns, besides what every forward
    does. Both positive, or both zero where no such curve shows."""

    square: float
    linear: float


def fit(lengths: Sequence[int], times: Sequence[int]) -> Curve:
    """By least squares over prompts of these lengths, in rising order, that took these times, ns; three at least. A
    part that is lost in the rest is zero."""
    fitted = np.polyfit(np.array(lengths, dtype=np.float64), np.array(times, dtype=np.float64), 2)
    square, linear = float(fitted[0]), float(fitted[1])
    shows = square * lengths[-1] ** 2 > _LOST * times[-1] and linear * lengths[-1] > _LOST * times[-1]
    return Curve(square, linear) if shows else Curve(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """``first`` is the size of a prompt's first chunk, in tokens. Of what a later one is too long by, the share
    ``smooth`` is taken off."""

    curve: Curve
    first: int
    smooth: float
    page_size: int

    def behind(self, tokens: int) -> int:
        """The size of a chunk that comes behind so many: x with T(tokens + x) - T(tokens) = T(first)."""
        square, linear = self.curve
        if square == 0:
            return self.first
        slope = linear + 2 * square * tokens
        wanted = square * self.first**2 + linear * self.first
        equal = (sqrt(slope**2 + 4 * square * wanted) - slope) / (2 * square)
        grain = max(_GRAIN, self.page_size)
        size = round(self.first + self.smooth * (equal - self.first)) // grain * grain
        return min(max(size, grain), self.first)
