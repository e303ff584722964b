"""Blocks of a simulated machine: noise, drift, warm-up and unequal slots, with or without an effect."""

from __future__ import annotations

import numpy as np

from schedbench.profiles.judge.statistics import abba


def blocks(
    rng: np.random.Generator,
    *,
    pairs: int,
    cv: float,
    effect: float = 0.0,
    drift: float = 0.0,
    ramp: float = 0.0,
    slot: float = 0.0,
) -> list[float]:
    """Returns 2 x pairs values. ``drift`` is over the run, ``ramp`` the error of the first block, ``slot`` that of
    every second block of a pair; all are shares."""
    time = np.arange(2 * pairs)
    on_b = np.array(abba(pairs)) == "b"
    noise = 1 + cv * rng.standard_normal(2 * pairs)
    slow = (1 + drift * time / (2 * pairs)) * (1 + ramp * np.exp(-time / 3)) * (1 + slot * (time % 2))
    return list(100 * noise * slow * np.where(on_b, 1 + effect, 1.0))
