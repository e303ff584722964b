"""Blocks of a simulated machine: noise, drift, warm-up and unequal slots, with or without an effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from schedbench.profiles.judge.effects import added
from schedbench.profiles.judge.gates import GateOutcome, check, parse
from schedbench.profiles.judge.statistics import abba
from schedbench.profiles.judge.verdict import Judgement
from schedbench.profiles.record.result import Result


def blocks(
    rng: np.random.Generator,
    *,
    pairs: int,
    cv: float,
    effect: float = 0.0,
    drift: float = 0.0,
    ramp: float = 0.0,
    slot: float = 0.0,
    spread: float = 0.0,
    between: float = 0.0,
) -> list[float]:
    """Returns 2 x pairs values. ``drift`` is over the run, ``ramp`` the error of the first block, ``slot`` that of
    every second block of a pair, ``spread`` by how much workloads differ, and ``between`` by how much their effects do;
    all are shares."""
    workload = np.arange(2 * pairs) // 4
    levels, effects = (1 + by * rng.standard_normal(pairs)[workload] for by in (spread, between))
    time = np.arange(2 * pairs)
    on_b = np.array(abba(pairs)) == "b"
    noise = 1 + cv * rng.standard_normal(2 * pairs)
    slow = (1 + drift * time / (2 * pairs)) * (1 + ramp * np.exp(-time / 3)) * (1 + slot * (time % 2))
    return list(100 * levels * noise * slow * np.where(on_b, effects + effect, 1.0))


def gated(
    text: str, judged: Mapping[str, Judgement], *, a: Sequence[Result], b: Sequence[Result]
) -> GateOutcome:
    return check(parse(text), judged, a=a, b=b, more=added(a, b))
