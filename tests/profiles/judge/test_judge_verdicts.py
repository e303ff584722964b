"""Verdicts on synthetic measurements: the rates of false and of found differences, and the reasons of refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from schedbench.profiles.judge.compare import HEADLINE, overall
from schedbench.profiles.judge.statistics import abba
from schedbench.profiles.judge.verdict import (
    DEFAULT_PAIRS,
    MIN_PAIRS,
    MIN_SEEDS,
    Reason,
    corrected,
    judge_blocks,
    judge_seeds,
    judge_unpaired,
)
from tests.profiles.judge.synthetic import blocks


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


def verdict_on(*metrics: list[float]) -> str:
    """The verdict of a whole comparison: several metrics, for all of which higher is better, with Holm's correction."""
    judged = {f"m{at}": judge_blocks(values, "higher") for at, values in enumerate(metrics)}
    return overall(corrected(judged, list(judged)).values())[0]


@pytest.mark.wide
def test_at_most_one_in_twenty_comparisons_of_a_with_a_finds_a_difference(rng):
    verdicts: Counter[str] = Counter()
    for _ in range(100):
        trouble = {
            "cv": rng.uniform(0.005, 0.05),
            "drift": rng.choice([0, rng.uniform(-0.1, 0.1)]),
            "ramp": rng.choice([0, rng.uniform(-0.1, 0.2)]),
            "slot": rng.choice([0, rng.uniform(-0.03, 0.03)]),
        }
        verdicts[verdict_on(*(blocks(rng, pairs=DEFAULT_PAIRS, **trouble) for _ in range(3)))] += 1
    assert verdicts["better"] + verdicts["worse"] + verdicts["trade-off"] <= 5, verdicts


@pytest.mark.wide
@pytest.mark.parametrize("effect", [0.02, -0.02])
def test_two_percent_are_found_in_four_of_five_comparisons(rng, effect):
    verdicts = Counter(
        verdict_on(*(blocks(rng, pairs=DEFAULT_PAIRS, cv=0.01, effect=e) for e in (effect, 0.0, 0.0)))
        for _ in range(100)
    )
    assert verdicts["better" if effect > 0 else "worse"] >= 80, verdicts


@pytest.mark.wide
def test_the_spread_of_workloads_is_neither_noise_nor_drift_nor_a_ramp(rng):
    verdicts, reasons = Counter(), Counter()
    for _ in range(100):
        found = judge_blocks(blocks(rng, pairs=DEFAULT_PAIRS, cv=0.01, effect=0.02, spread=0.2), "higher")
        verdicts[found.verdict] += 1
        reasons.update(found.reasons)
    assert verdicts["better"] >= 80 and reasons[Reason.DRIFT] + reasons[Reason.WARMUP_RAMP] <= 3, reasons


@pytest.mark.wide
def test_the_interval_covers_workloads_whose_effects_differ(rng):
    """On a quiet machine, where blocks of one workload would decide with its own effect."""
    every = [judge_blocks(blocks(rng, pairs=20, cv=0.002, between=0.01), "higher") for _ in range(100)]
    assert sum(found.verdict in ("better", "worse") for found in every) <= 5
    assert sum(found.interval.low <= 0 <= found.interval.high for found in every) >= 88


def test_no_change_is_found_on_a_quiet_machine(rng):
    found = judge_blocks(blocks(rng, pairs=DEFAULT_PAIRS, cv=0.002), "lower")
    assert (found.verdict, found.reasons, found.n) == ("no change", (), DEFAULT_PAIRS)
    assert found.interval.within(found.min_effect)


def test_the_effect_of_slot_order_is_separated(rng):
    found = judge_blocks(blocks(rng, pairs=20, cv=0.001, effect=0.05, slot=0.01), "lower")
    assert found.verdict == "worse"
    assert found.delta == pytest.approx(5, abs=0.1)
    assert found.slot == pytest.approx(1, abs=0.1)
    assert found.floor == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"ramp": 0.2}, Reason.WARMUP_RAMP),
        ({"drift": 0.3}, Reason.DRIFT),
        ({"slot": 0.05}, Reason.ORDER_EFFECT),
    ],
)
def test_a_doubtful_run_gets_no_verdict_and_a_reason(rng, trouble, reason):
    found = judge_blocks(blocks(rng, pairs=20, cv=0.005, effect=0.02, **trouble), "higher")
    assert found.verdict == "inconclusive"
    assert reason in found.reasons


def test_few_pairs_are_a_screen(rng):
    found = judge_blocks(blocks(rng, pairs=12, cv=0.001, effect=0.1), "higher")
    assert (found.verdict, found.reasons, found.needed) == ("inconclusive", (Reason.LOW_N,), MIN_PAIRS)
    assert found.delta == pytest.approx(10, abs=1)


def test_a_noisy_run_names_the_number_of_pairs_needed(rng):
    found = judge_blocks(blocks(rng, pairs=20, cv=0.015), "higher")
    assert found.reasons == (Reason.LOW_N,)
    assert found.resolve == 1.0
    assert found.needed is not None and 100 < found.needed < 600


def test_the_number_of_pairs_in_the_hint_suffices(rng):
    found = judge_blocks(blocks(rng, pairs=20, cv=0.01), "higher")
    assert found.needed is not None
    verdicts = Counter(
        judge_blocks(blocks(rng, pairs=found.needed, cv=0.01, effect=0.01), "higher").verdict
        for _ in range(20)
    )
    assert verdicts["better"] >= 14, (found.needed, verdicts)


def test_the_direction_of_the_metric_decides():
    a, b = [10.0] * 5, [9.0, 9.1, 9.0, 8.9, 9.0]
    assert judge_seeds(a, b, "lower").verdict == "better"
    assert judge_seeds(a, b, "higher").verdict == "worse"


def test_seeds_of_both_signs_give_no_verdict():
    found = judge_seeds([100.0] * 5, [102.0, 103.0, 99.0, 102.0, 104.0], "higher")
    assert (found.verdict, found.reasons) == ("inconclusive", (Reason.LOW_N,))
    assert (found.interval.low, found.interval.high) == (-1.0, 4.0)


def test_four_seeds_are_too_few_even_when_they_agree():
    found = judge_seeds([100.0] * 4, [110.0] * 4, "higher")
    assert (found.verdict, found.reasons, found.delta) == ("inconclusive", (Reason.LOW_N,), 10.0)
    assert found.needed == MIN_SEEDS


def test_a_spread_around_no_change_names_the_seeds_that_would_suffice():
    values = [100.0, 99.2, 99.8, 100.3, 100.9]
    found = judge_seeds([100.0] * 5, values, "higher")
    assert (found.reasons, found.needed) == ((Reason.LOW_N,), 30)
    assert judge_seeds([100.0] * 30, values * 6, "higher").verdict == "no change"
    near = judge_seeds([100.0] * 5, [100.4, 100.45, 100.49, 100.52, 100.6], "higher")
    assert (near.reasons, near.needed) == ((Reason.LOW_N,), None)


def test_an_effect_below_the_minimum_is_no_change():
    values = [100.1, 100.2, 100.3, 100.2, 100.4]
    assert judge_seeds([100.0] * 5, values, "higher").verdict == "no change"
    assert judge_seeds([100.0] * 5, values, "higher", min_effect=0.05).verdict == "better"


def test_seeds_whose_changes_have_the_mean_0_seldom_give_a_verdict(rng):
    """Any of the three metrics of the headline is better or worse by chance in one of twenty comparisons at most."""
    for changes in (partial(rng.normal, 0, 3), partial(rng.standard_t, 2)):
        for n, alike in ((5, 400), (20, 200)):
            by_chance = 0
            for _ in range(alike):
                judged = {
                    name: judge_seeds([100.0] * n, 100 + changes(size=n), "higher") for name in HEADLINE
                }
                found = corrected(judged, HEADLINE).values()
                by_chance += any(one.verdict in ("better", "worse") for one in found)
            assert by_chance < 0.08 * alike, (n, by_chance)


def test_more_seeds_find_a_small_change_that_few_do_not(rng):
    def found(n):
        return sum(
            judge_seeds([100.0] * n, 101.5 + rng.normal(0, 1, n), "higher").verdict == "better"
            for _ in range(50)
        )

    assert found(5) < 30 < 45 < found(40)


def test_a_change_from_0_is_one_on_each_seed_and_else_has_no_percentage():
    assert judge_seeds([0.0] * 5, [1.0, 2.0, 1.0, 1.0, 2.0], "lower").verdict == "worse"
    assert judge_seeds([0.0] * 5, [0.0, 2.0, 1.0, 1.0, 2.0], "lower").reasons == (Reason.OF_ZERO,)


def test_equal_values_are_equal_even_at_zero():
    found = judge_seeds([0.0] * 2, [0.0] * 2, "lower")
    assert (found.verdict, found.delta) == ("no change", 0.0)


@pytest.mark.parametrize("pairs", [1, 2, 8])
def test_measured_values_of_which_some_are_zero_have_no_percentages(pairs):
    found = judge_blocks(
        [0.0 if side == "a" else 1.0 + at % 2 for at, side in enumerate(abba(2 * pairs))], "lower"
    )
    assert (found.verdict, found.reasons) == ("inconclusive", (Reason.OF_ZERO,))
    assert (
        corrected(
            {"some": found, "other": judge_blocks([1.0 + (side == "b") for side in abba(16)], "lower")},
            ["some", "other"],
        )["other"].verdict
        == "worse"
    )
    stored = judge_unpaired([0.0, 1.0] * pairs, [1.0, 2.0] * pairs, "lower")
    assert (
        stored.verdict == "inconclusive"
        and judge_unpaired([0.0] * 6, [0.0] * 6, "lower").verdict == "no change"
    )
    assert judge_blocks([0.0] * 32, "lower").verdict == "no change"


def test_stored_values_without_pairs_are_tested_and_labelled(rng):
    a, b = 100 + rng.standard_normal(12), 105 + rng.standard_normal(12)
    found = judge_unpaired(a, b, "higher")
    assert (found.verdict, found.n) == ("better", 12)
    assert "unpaired" in found.test
    assert judge_unpaired(a[:3], b[:3], "higher").reasons == (Reason.LOW_N,)


def test_holm_rejects_a_difference_of_a_single_test(rng):
    sure = judge_blocks(blocks(rng, pairs=20, cv=0.002, effect=0.05), "higher")
    found = replace(sure, p_value=0.03)
    alone = corrected({"gated": found, "other": found}, ["gated"])
    assert (alone["gated"].verdict, alone["gated"].p_value) == ("better", 0.03)
    both = corrected({"gated": found, "other": found}, ["gated", "other"])
    assert (both["gated"].verdict, both["gated"].p_value) == ("inconclusive", 0.06)
    assert both["gated"].reasons == (Reason.LOW_N,)
