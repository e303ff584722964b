"""Token counts drawn from the distributions of a scenario, and the summaries of the distributions themselves."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .workload_schema import Distribution, Fixed, LogNormal, Normal, Uniform

Counts = NDArray[np.int64]

_Z95 = 1.6448536269514722  # the standard normal's 95th percentile


class Summary(NamedTuple):
    """Of token counts."""

    mean: float
    p50: float
    p95: float

    def plus(self, tokens: int) -> Summary:
        """The summary of the same counts, each ``tokens`` larger."""
        return Summary(self.mean + tokens, self.p50 + tokens, self.p95 + tokens)


def summarise(counts: Counts) -> Summary:
    p50, p95 = np.percentile(counts, [50, 95])
    return Summary(float(counts.mean()), float(p50), float(p95))


def draw(dist: Distribution, size: int, *, rng: np.random.Generator) -> Counts:
    """``size`` token counts, [size] int64."""
    match dist:
        case Fixed():
            return np.full(size, dist.value, dtype=np.int64)
        case Uniform():
            return rng.integers(dist.min, dist.max, size=size, endpoint=True)
        case Normal():
            return _cut(rng.normal(dist.mean, dist.std, size), dist)
        case LogNormal():
            mu, sigma = _log_parameters(dist)
            return _cut(rng.lognormal(mu, sigma, size), dist)


def requested(dist: Distribution) -> Summary:
    """The summary of the distribution without its min and max."""
    match dist:
        case Fixed():
            return Summary(dist.value, dist.value, dist.value)
        case Uniform():
            width = dist.max - dist.min
            return Summary(dist.min + width / 2, dist.min + width / 2, dist.min + width * 0.95)
        case Normal():
            return Summary(dist.mean, dist.mean, dist.mean + _Z95 * dist.std)
        case LogNormal():
            mu, sigma = _log_parameters(dist)
            return Summary(dist.mean, math.exp(mu), math.exp(mu + _Z95 * sigma))


def _log_parameters(dist: LogNormal) -> tuple[float, float]:
    variance = math.log1p((dist.std / dist.mean) ** 2)
    return math.log(dist.mean) - variance / 2, math.sqrt(variance)


def _cut(values: NDArray[np.float64], dist: Normal | LogNormal) -> Counts:
    return np.rint(np.clip(values, dist.min, dist.max or 2**24)).astype(np.int64)
