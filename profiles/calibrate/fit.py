"""Fits a line a + b * n to times whose errors are upwards: other work of the machine makes some samples late."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import least_squares

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


def fit(samples: Iterable[TimedSample]) -> FittedLine:
    """Fit at least one sample. Neither a nor b is negative."""
    groups: defaultdict[float, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.n].append(sample.ns)
    if not groups:
        raise ValueError("nothing to fit: no samples")
    a, b = _constant(groups) if len(groups) == 1 else _robust(groups)
    distances = [abs(ns - a - b * n) for n, group in groups.items() for ns in group]
    worst_n, worst = _worst(groups, a, b)
    return FittedLine(a, b, len(distances), len(groups), median(distances), _r2(groups, a, b), worst_n, worst)


def _constant(groups: Mapping[float, list[float]]) -> tuple[float, float]:
    (group,) = groups.values()
    return median(group), 0.0


def _robust(groups: Mapping[float, list[float]]) -> tuple[float, float]:
    """Least relative deviation from the medians, weighted by their numbers of samples."""
    n = np.array(list(groups), dtype=float)
    y = np.array([median(group) for group in groups.values()])
    weight = np.sqrt([len(group) for group in groups.values()])
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


def _r2(groups: Mapping[float, list[float]], a: float, b: float) -> float | None:
    if len(groups) == 1:
        return None
    rows = [(len(group), n, median(group)) for n, group in groups.items()]
    mean = sum(count * y for count, _, y in rows) / sum(count for count, _, _ in rows)
    spread = sum(count * (y - mean) ** 2 for count, _, y in rows)
    left = sum(count * (y - a - b * n) ** 2 for count, n, y in rows)
    return 1 - left / spread if spread else None  # all medians are equal


def _worst(groups: Mapping[float, list[float]], a: float, b: float) -> tuple[float, float]:
    """The size, and its median as a multiple of the line; times below a nanosecond are taken as one."""
    shares = {n: max(median(group), 1.0) / max(a + b * n, 1.0) for n, group in groups.items()}
    return max(shares.items(), key=lambda entry: abs(math.log(entry[1])))
