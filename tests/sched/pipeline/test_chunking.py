"""Chunks of equal time, computed from the times of prompts of several lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedbench.sched.pipeline import ChunkSizes, Curve, fit

FIRST = 8192
ATTENTION = Curve(square=2.0, linear=9000.0)


def cost(curve: Curve, tokens: int) -> float:
    return curve.square * tokens**2 + curve.linear * tokens


def test_a_parabola_is_fitted_whatever_the_fixed_cost() -> None:
    lengths = [1024, 2048, 4096, 8192]
    curve = fit(lengths, [round(cost(ATTENTION, length)) + 70_000 for length in lengths])
    assert curve == pytest.approx(ATTENTION, rel=1e-3)


@given(st.integers(1, 10**6))
def test_a_later_chunk_takes_as_long_as_the_first(tokens: int) -> None:
    size = ChunkSizes(ATTENTION, FIRST, smooth=1.0, page_size=1).behind(tokens)
    wanted = cost(ATTENTION, FIRST)
    assert cost(ATTENTION, tokens + size) - cost(ATTENTION, tokens) <= 1.05 * wanted or size == 64
    longer = size + 64
    assert longer > FIRST or cost(ATTENTION, tokens + longer) - cost(ATTENTION, tokens) >= 0.95 * wanted


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.sampled_from([1, 16, 64, 256]))
def test_chunks_never_grow_and_are_whole_pages(tokens: int, more: int, page_size: int) -> None:
    sizes = ChunkSizes(ATTENTION, FIRST, smooth=0.75, page_size=page_size)
    before, behind = sizes.behind(tokens), sizes.behind(tokens + more)
    assert FIRST >= before >= behind > 0
    assert behind % page_size == 0


def test_smoothing_shrinks_chunks_by_a_share() -> None:
    none, half, full = (ChunkSizes(ATTENTION, FIRST, smooth, 1).behind(50_000) for smooth in (0.0, 0.5, 1.0))
    assert none == FIRST
    assert half == pytest.approx((FIRST + full) / 2, abs=64)


@pytest.mark.parametrize("times", [[700, 700, 700], [700, 701, 702], [900, 800, 700], [1000, 2000, 3000]])
def test_without_a_quadratic_part_chunks_stay_equal(times: list[int]) -> None:
    curve = fit([1000, 2000, 3000], times)
    assert curve == Curve(0.0, 0.0)
    assert ChunkSizes(curve, FIRST, smooth=1.0, page_size=1).behind(50_000) == FIRST


def test_a_first_chunk_below_the_grain_is_kept() -> None:
    assert ChunkSizes(ATTENTION, 32, smooth=1.0, page_size=1).behind(1000) == 32
