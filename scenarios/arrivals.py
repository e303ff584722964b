"""When requests arrive, in integer nanoseconds from the start of the run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .distributions import Counts
from .workload_schema import (
    Arrival,
    BurstArrivals,
    ClosedArrivals,
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    RecordedArrivals,
)

SECOND = 1_000_000_000
_LAST = 2**62  # beyond any run, and still an int64


def arrivals(process: Arrival, instants: Counts, *, rng: np.random.Generator) -> Counts:
    """Ascending arrival times, the first at 0. ``instants`` [n] are the trace's, zeros without one.

    The requests of a closed loop arrive when their client sends them; here they are all at 0.
    """
    n = len(instants)
    match process:
        case BurstArrivals() | ClosedArrivals():
            return np.zeros(n, dtype=np.int64)
        case ConstantArrivals():
            return _nanoseconds(np.arange(n) / process.rate)
        case PoissonArrivals():
            return _after(rng.exponential(1 / process.rate, n))
        case GammaArrivals():
            shape = process.burstiness
            return _after(rng.gamma(shape, 1 / (process.rate * shape), n))
        case RecordedArrivals():
            return _nanoseconds((instants - instants[:1]) / (process.speed * SECOND))


def _after(gaps: NDArray[np.float64]) -> Counts:
    return _nanoseconds(np.cumsum(gaps) - gaps[:1])


def _nanoseconds(seconds: NDArray[np.float64]) -> Counts:
    return np.minimum(np.rint(seconds * SECOND), _LAST).astype(np.int64)
