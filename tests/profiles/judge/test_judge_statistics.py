"""The statistics compared with values computed by hand, with scipy, and with properties."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedbench.profiles.judge import statistics
from schedbench.profiles.judge.statistics import (
    Interval,
    abba,
    centred,
    estimate,
    holm,
    mann_whitney,
    order_interval,
    paired,
    pairs_needed,
    percent,
    same_side,
    wilcoxon,
)

positive = st.floats(1, 1000)


def test_the_order_is_abba():
    assert ["".join(abba(pairs)) for pairs in (2, 5, 6)] == ["abba", "abbaabbaba", "abbaabbabaab"]
    order = "".join(abba(40))
    before = Counter(zip(order[1:], order, strict=False))
    assert {*before.values()} <= {19, 20, 21}, "each side follows each as often"
    assert order[::4].count("a") == order[::4].count("b")


def test_percent_is_relative_to_a():
    assert (percent(100, 98), percent(0, 0)) == (-2.0, 0.0)
    assert (percent(0, 1), percent(0, -1)) == (math.inf, -math.inf)


def test_pairs_are_b_relative_to_a_in_either_order():
    pairs = paired([100, 102, 204, 200])
    assert pairs.differences == pytest.approx([2, 2])
    assert list(pairs.order) == [1, -1]


def test_a_side_compared_with_itself_has_no_effect():
    values = [100, 200, 200, 110, 220, 110, 110, 230]
    assert same_side(values).differences == pytest.approx([0, 0])


@given(st.integers(2, 12), st.floats(-0.2, 0.2), st.floats(-0.05, 0.05))
def test_a_slot_effect_does_not_change_the_effect(pairs, effect, slot):
    sides = abba(pairs)
    values = [100 * (1 + effect * (side == "b")) * math.exp(slot * (at % 2)) for at, side in enumerate(sides)]
    assert estimate(paired(values)).median == pytest.approx(100 * effect, abs=0.2 + 30 * abs(slot * effect))


@given(st.lists(positive, min_size=4, max_size=24).filter(lambda x: len(x) % 4 == 0))
def test_scaling_changes_nothing(values):
    once, twice = estimate(paired(values)), estimate(paired([2 * x for x in values]))
    assert twice.median == pytest.approx(once.median)
    assert twice.interval == pytest.approx(once.interval)


@given(st.lists(positive, min_size=8, max_size=24).filter(lambda x: len(x) % 4 == 0))
def test_the_interval_holds_the_median_of_resamples(values):
    effect = estimate(paired(values))
    assert effect.interval.low <= effect.interval.high
    assert np.median(centred(paired(values))) == pytest.approx(effect.median)


def test_wilcoxon_is_exact():
    assert wilcoxon(np.array([1.0, 2, 3, 4, 5, 6])) == pytest.approx(2 / 2**6)
    assert wilcoxon(np.zeros(6)) == 1.0


def test_mann_whitney_is_exact():
    assert mann_whitney([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / 20)
    assert mann_whitney([0.5], [0.5, 0.5]) == 1.0


def test_holm_equals_values_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_never_lowers_and_keeps_the_order(p_values):
    adjusted = holm(p_values)
    assert all(after >= before for before, after in zip(p_values, adjusted, strict=True))
    ranked = [after for _, after in sorted(zip(p_values, adjusted, strict=True))]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize(("n", "low", "high"), [(1, 0, 0), (5, 0, 4), (8, 0, 7), (9, 1, 7), (20, 5, 14)])
def test_order_statistics_of_the_median(n, low, high):
    assert order_interval([float(x) for x in range(n)]) == Interval(low, high)


def test_intervals_of_the_median():
    assert Interval(0.6, 2).beyond(0.5) and Interval(-2, -0.6).beyond(0.5)
    assert not Interval(0.4, 2).beyond(0.5)
    assert Interval(-0.5, 0.5).within(0.5) and not Interval(-0.6, 0.1).within(0.5)


def test_four_times_the_width_needs_sixteen_times_the_pairs():
    few = pairs_needed(Interval(-1, 1), n=100, resolve=1, band=0)
    many = pairs_needed(Interval(-4, 4), n=100, resolve=1, band=0)
    assert few is not None and many is not None
    assert many == pytest.approx(16 * few, rel=0.01)
    assert pairs_needed(Interval(-1, 1), n=10, resolve=0.5, band=0.5) is None


def test_drift_is_measured_over_the_whole_run():
    values = [100 * (1 + 0.12 * at / 39) for at in range(40)]
    assert statistics.drift(statistics.departures(values)) == pytest.approx(12, rel=0.1)
    assert statistics.drift(statistics.departures([100.0] * 40)) == 0.0


def test_a_ramp_is_one_sided_and_exceeds_the_noise():
    steady = [100.0, 101.0, 99.0, 100.5] * 5
    assert not statistics.ramp(statistics.departures(steady), min_effect=0.5)
    assert statistics.ramp(statistics.departures([120.0, 110.0, *steady[2:]]), min_effect=0.5)


def test_a_workload_has_one_effect_without_the_slot_order_effect():
    values = [100, 103, 202, 200, 405, 400, 200, 209]  # of second blocks, one percent and 1.625 percent more
    effects, slots = statistics.of_workloads(paired(values))
    assert (list(effects), list(slots)) == (pytest.approx([2, 2.875]), pytest.approx([1, 1.625]))
