"""Drawn values compared with the requested distributions."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from schedbench.scenarios.script import draw, requested, summarise
from schedbench.scenarios.workload_schema import Distribution, Fixed, LogNormal, Normal, Uniform

SIZE = 40_000
DISTRIBUTIONS = [
    Fixed(dist="fixed", value=17),
    Uniform(dist="uniform", min=16, max=700),
    Normal(dist="normal", mean=500, std=60),
    LogNormal(dist="lognormal", mean=900, std=700),
]


@pytest.mark.parametrize("dist", DISTRIBUTIONS, ids=lambda dist: dist.dist)
def test_many_draws_have_the_mean_and_percentiles_that_were_requested(dist: Distribution) -> None:
    drawn = draw(dist, SIZE, rng=np.random.default_rng(0))

    assert drawn.dtype == np.int64
    assert astuple(summarise(drawn)) == pytest.approx(astuple(requested(dist)), rel=0.02)


def test_both_ends_of_uniform_are_drawn() -> None:
    drawn = draw(Uniform(dist="uniform", min=3, max=5), 200, rng=np.random.default_rng(0))
    assert set(drawn) == {3, 4, 5}


@pytest.mark.parametrize("kind", [Normal, LogNormal])
def test_draws_are_clipped_to_their_bounds(kind: type[Normal] | type[LogNormal]) -> None:
    dist = kind.model_validate({"dist": kind.__name__.lower(), "mean": 50, "std": 200, "min": 20, "max": 90})
    drawn = draw(dist, 500, rng=np.random.default_rng(0))

    assert (drawn.min(), drawn.max()) == (20, 90)


def test_without_bounds_no_draw_is_below_one_token() -> None:
    assert draw(Normal(dist="normal", mean=1, std=50), 500, rng=np.random.default_rng(0)).min() == 1
