"""Hardware profiles drawn from the ranges of their constants, and how far a verdict on emulated times depends on them.

Draws are a Latin hypercube (McKay, Beckman and Conover, 1979): each constant's range is cut into as many slices of
equal probability as there are draws, and every slice is used once. Half of the probability lies between ``low`` and
``value`` and half between ``value`` and ``high``, evenly in either half: the middle of the draws is the profile itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pydantic import BaseModel

from ..platform.hardware import GemmRates, HardwareProfile, Quantity
from ..record.result import Abstained, Result

DRAWS: Final = 16
LEFT_OUT: Final = f"--quick or --draws 0 leaves it out; --draws {DRAWS} asks it"  # as a reason

HARDWARE: Final = "device.hardware"  # the key that a draw replaces

_SPECULATION: Final = frozenset({"draft", "verify", "draft_extend", "lengths"})  # phases
_OTHER_PHASE: Final = {"flatten_list": "flatten_numpy", "flatten_numpy": "flatten"}  # by the relay's policy

Profiles = Sequence[HardwareProfile]
Draw = Mapping[str, float]  # a value for each uncertain constant, by its dotted path in the profile


@dataclass(frozen=True, slots=True)
class Firmness:
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


def uncertain(profile: HardwareProfile) -> dict[str, Quantity[float]]:
    """Return the constants that have a range, by their dotted paths."""
    return {path: quantity for path, quantity in _quantities(profile, "") if quantity.low < quantity.high}


def draws(
    profile: HardwareProfile, count: int = DRAWS, *, runs: Sequence[Result] = (), seed: int = 0
) -> list[Draw]:
    """Return ``count`` draws of the uncertain constants, without those of phases, links and element types that none of
    ``runs`` has. A constant has the same draws for the same profile, count and seed, whatever the runs are."""
    constants = uncertain(profile)
    unused = set.intersection(*map(_unused, runs)) if runs else set()
    if not constants:
        return []
    from scipy.stats import qmc  # this import takes longer than a comparison of stored results

    quantiles = qmc.LatinHypercube(d=len(constants), rng=np.random.default_rng(seed)).random(count)
    return [
        {
            path: float(np.interp(q, (0.0, 0.5, 1.0), (quantity.low, quantity.value, quantity.high)))
            for (path, quantity), q in zip(constants.items(), row, strict=True)
            if not any(f"{path}.".startswith(f"{part}.") for part in unused)
        }
        for row in quantiles
    ]


def _unused(run: Result) -> set[str]:
    """The parts of a profile of which the run uses no constant, by their dotted paths."""
    expanded: Any = run.scenario.expanded
    phases = {_OTHER_PHASE.get(run.relay.policies.get("flatten", ""), "")}
    if expanded["engine"]["speculative"]["algorithm"] == "none":
        phases |= _SPECULATION
    used = {expanded["model"]["dtype"], "float32"}  # the sampler computes in float32
    parts = {f"phases.{name}" for name in phases}
    parts |= {f"kernels.gemm_rates.{name}" for name in GemmRates.model_fields if name not in used}
    return parts if run.ranks else parts | {"links"}


def drawn_profile(profile: HardwareProfile, draw: Draw) -> HardwareProfile:
    """Return the profile with the drawn values, each without a range."""
    found = profile.model_dump()
    for path, value in draw.items():
        inner = found
        for key in path.split("."):
            inner = inner[key]
        inner |= {"value": value, "low": value, "high": value}
    return HardwareProfile.model_validate(found)


def firmness(effect: float, effects: Sequence[float], drawn: Sequence[Draw]) -> Firmness | Abstained:
    """Hold the effect of the profile as it stands, in percent, against those under the draws, in their order. Abstains
    where A is 0, since there is no percentage of zero."""
    undefined = sum(not math.isfinite(value) for value in effects)
    if undefined or not math.isfinite(effect):
        where = f"in {undefined} of {len(effects)} draws" if undefined else "without draws"
        return Abstained(abstained=f"A is 0 {where}: an effect in percent is undefined there")
    holding = sum(value * effect > 0.0 or value == effect for value in effects)
    return Firmness(len(effects), holding, min(effects), max(effects), *followed(effects, drawn))


def followed(values: Sequence[float], drawn: Sequence[Draw]) -> tuple[str, float]:
    """Return the constant that ``values`` under the draws, in their order, follow most, with their rank correlation.

    The correlation is Spearman's, over the draws; a constant that no run depends on has one by chance alone, at most
    about 0.7 among sixty constants and sixteen draws.
    """
    from scipy.stats import spearmanr

    paths = drawn[0] if len(set(values)) > 1 else ()
    found = {path: float(spearmanr([draw[path] for draw in drawn], values).statistic) for path in paths}
    return max(found.items(), key=lambda one: abs(one[1]), default=("", 0.0))


def _quantities(part: object, path: str) -> Iterator[tuple[str, Quantity[float]]]:
    if isinstance(part, Quantity):
        yield path, part
    elif isinstance(part, (BaseModel, Mapping)):
        for name, inner in part.items() if isinstance(part, Mapping) else part:
            yield from _quantities(inner, f"{path}.{name}" if path else name)
