"""Hardware profiles drawn from the ranges of their constants, and what a verdict on emulated times owes to them.

Draws are a Latin hypercube (McKay, Beckman and Conover, 1979): each constant's range is cut into as many slices of
equal probability as there are draws, and every slice is used once. Half of the probability lies between ``low`` and
``value`` and half between ``value`` and ``high``, evenly in either half: the middle of the draws is the profile itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic import BaseModel
from scipy.stats import qmc, spearmanr

from ..platform.hardware import HardwareProfile, Quantity

DRAWS: Final = 16
_NOT_IN_A_FILE: Final = {"sha256"}

Draw = Mapping[str, float]  # a value for each uncertain constant, by its dotted path in the profile


class Firmness(NamedTuple):
    """What became of an effect over draws: how often its sign held, between which effects (percent), and the constant
    that the effect follows most, with their rank correlation."""

    draws: int
    holding: int
    low: float
    high: float
    constant: str
    correlation: float

    @property
    def flips(self) -> bool:
        """Whether the effect has either sign somewhere within the ranges."""
        return self.low < 0.0 < self.high


def uncertain(profile: HardwareProfile) -> dict[str, Quantity]:
    """Return the constants that have a range, by their dotted paths."""
    return {path: quantity for path, quantity in _quantities(profile, "") if quantity.low < quantity.high}


def draws(profile: HardwareProfile, count: int = DRAWS, *, seed: int = 0) -> list[Draw]:
    """Return ``count`` draws of all uncertain constants; the same ones for the same profile, count and seed."""
    constants = uncertain(profile)
    if not constants:
        return []
    quantiles = qmc.LatinHypercube(d=len(constants), rng=np.random.default_rng(seed)).random(count)
    return [
        {path: _at(quantity, float(q)) for (path, quantity), q in zip(constants.items(), row, strict=True)}
        for row in quantiles
    ]


def _at(quantity: Quantity, quantile: float) -> float:
    return float(np.interp(quantile, (0.0, 0.5, 1.0), (quantity.low, quantity.value, quantity.high)))


def document(profile: HardwareProfile, draw: Draw) -> dict[str, Any]:
    """Return the profile with the drawn values, each without a range, in the form of a profile's file."""
    found: dict[str, Any] = profile.model_dump(mode="json", exclude=_NOT_IN_A_FILE, exclude_defaults=True)
    for path, value in draw.items():
        inner = found
        for key in path.split("."):
            inner = inner[key]
        inner |= {"value": value, "low": value, "high": value}
    return found


def firmness(effect: float, effects: Sequence[float], drawn: Sequence[Draw]) -> Firmness:
    """Hold the effect of the profile as it stands, in percent, against the ``effects`` under the draws, in their order.

    The correlation is Spearman's, over the draws; a constant that no run depends on has one by chance alone, at most
    about 0.7 among sixty constants and sixteen draws.
    """
    constant, correlation = max(
        _correlations(effects, drawn), key=lambda found: abs(found[1]), default=("", 0.0)
    )
    holding = sum(value * effect > 0.0 or value == effect for value in effects)
    return Firmness(len(effects), holding, min(effects), max(effects), constant, correlation)


@contextmanager
def files(profile: HardwareProfile, drawn: Sequence[Draw]) -> Iterator[list[Path]]:
    """Write each draw as a hardware profile that ``device.hardware`` can name; the files are gone after the block."""
    with TemporaryDirectory(prefix="schedbench-draws-") as folder:
        paths = [Path(folder) / f"{profile.name}-{number}.yaml" for number in range(len(drawn))]
        for path, draw in zip(paths, drawn, strict=True):
            path.write_text(json.dumps(document(profile, draw)), encoding="utf-8")  # JSON is YAML
        yield paths


def _correlations(effects: Sequence[float], drawn: Sequence[Draw]) -> Iterator[tuple[str, float]]:
    if len(set(effects)) < 2:
        return
    for path in drawn[0]:
        yield path, float(spearmanr([draw[path] for draw in drawn], effects).statistic)


def _quantities(part: object, path: str) -> Iterator[tuple[str, Quantity]]:
    if isinstance(part, Quantity):
        yield path, part
    elif isinstance(part, (BaseModel, Mapping)):
        for name, inner in part.items() if isinstance(part, Mapping) else part:
            yield from _quantities(inner, f"{path}.{name}" if path else name)
