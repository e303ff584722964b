"""Exact quantiles of integer samples, kept as counts so that equal samples take no memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Self


def needed(quantile: float) -> int:
    """Samples that support a quantile: one of them must be able to lie beyond it. p99 needs 100."""
    return round(1 / (1 - quantile))


@dataclass(init=False, eq=False, slots=True)
class Distribution:
    """A multiset of nanoseconds (or any integers)."""

    _seen: Counter[int]

    def __init__(self, samples: Iterable[int] = ()) -> None:
        self._seen = Counter(samples)

    @classmethod
    def merged(cls, parts: Iterable[Distribution]) -> Self:
        whole = cls()
        for part in parts:
            whole._seen.update(part._seen)
        return whole

    def add(self, sample: int) -> None:
        self._seen[sample] += 1

    def extend(self, samples: Iterable[int]) -> None:
        self._seen.update(samples)

    def __len__(self) -> int:
        return self._seen.total()

    @property
    def min(self) -> int:
        return min(self._seen)

    @property
    def max(self) -> int:
        return max(self._seen)

    @property
    def mean(self) -> float:
        return sum(sample * times for sample, times in self._seen.items()) / len(self)

    def quantile(self, quantile: float) -> float | None:
        """Interpolated between the two nearest ranks; None when there are too few samples to support it."""
        n = len(self)
        if n < needed(quantile):
            return None
        samples = sorted(self._seen)
        ranks = list(accumulate(self._seen[sample] for sample in samples))
        below, part = divmod((n - 1) * quantile, 1)
        low = samples[bisect_right(ranks, below)]
        high = samples[bisect_right(ranks, min(below + 1, n - 1))]
        return low + (high - low) * part
