"""Fits a line a + b * n to times whose errors are upwards: other work of the machine makes some samples late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Final, NamedTuple

import numpy as np

# Relative deviations beyond this one count linearly, smaller ones by their square.
_TOLERATED: Final = 0.05
_STARTS: Final = ((1.0, 0.1), (0.1, 1.0))


class TimedSample(NamedTuple):
    """Work of size ``n`` took ``ns`` nanoseconds."""

    n: float
    ns: float


class FittedLine(NamedTuple):
    """ns = a + b * n. ``residual`` is the median distance of a sample, in ns. ``r2`` is that of the medians per n,
    weighted by their samples; with only one n it is None, and b is 0. At ``worst_n`` a median is farthest from the
    line, ``worst`` times its value."""

    a: float
    b: float
    samples: int
    sizes: int
    residual: float
    r2: float | None
    worst_n: float
    worst: float

    def at(self, n: float) -> float:
        return self.a + self.b * n


class FittedConstant(NamedTuple):
    """A measured value of the profile. ``key`` is its dotted path, such as ``phases.admit.b``. ``spread`` is the
    half-width of its range, in the value's unit. ``basis`` says what it follows from. ``old`` is the base's value of a
    constant of the device."""

    key: str
    value: float
    spread: float
    basis: str
    old: float | None = None


def fit(samples: Iterable[TimedSample]) -> FittedLine:
    """Fit at least one sample. Neither a nor b is negative."""
    groups: defaultdict[float, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.n].append(sample.ns)
    if not groups:
        raise ValueError("nothing to fit: no samples")
    n, counts = np.array(list(groups), dtype=float), np.array([len(group) for group in groups.values()])
    y = np.array([median(group) for group in groups.values()])
    a, b = _robust(n, y, counts) if len(groups) > 1 else (float(y[0]), 0.0)
    line = a + b * n
    distances = [abs(ns - a - b * size) for size, group in groups.items() for ns in group]
    spread = float(np.sum(counts * (y - np.average(y, weights=counts)) ** 2))
    left = float(np.sum(counts * (y - line) ** 2))
    shares = np.maximum(y, 1.0) / np.maximum(line, 1.0)  # times below a nanosecond are taken as one
    worst = int(np.argmax(np.abs(np.log(shares))))
    return FittedLine(
        a,
        b,
        len(distances),
        len(groups),
        residual=median(distances),
        r2=1 - left / spread if len(groups) > 1 and spread else None,  # None also where all medians are equal
        worst_n=float(n[worst]),
        worst=float(shares[worst]),
    )


def _robust(n: np.ndarray, y: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Least relative deviation from the medians ``y``, weighted by their numbers of samples."""
    from scipy.optimize import least_squares  # a plan of calibrations is made without it

    weight = np.sqrt(counts)
    unit, scale = float(np.max(np.abs(n))), max(float(np.max(y)), 1.0)
    size = weight / np.maximum(y / scale, 1.0 / scale)  # below a nanosecond deviations are absolute

    def deviation(p: np.ndarray) -> np.ndarray:
        return np.asarray(size * (p[0] + p[1] * n / unit - y / scale))

    found = min(
        (
            least_squares(
                deviation,
                start,
                bounds=(0.0, np.inf),
                loss="soft_l1",
                f_scale=_TOLERATED,
                x_scale="jac",
                xtol=1e-12,
                ftol=1e-12,
                gtol=1e-12,
            )
            for start in _STARTS
        ),
        key=lambda result: float(result.cost),
    )
    return float(found.x[0]) * scale, float(found.x[1]) * scale / unit
