"""Gates: what they mean, when they hold, and when nobody can tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedbench.profiles.judge.gates import GateError, check, parse
from schedbench.profiles.judge.verdict import Judgement, Reason, judge_seeds


@pytest.fixture
def drop() -> Judgement:
    """Throughput down by 1 to 3 %."""
    return judge_seeds([100.0] * 5, [98.0, 97.0, 99.0, 98.0, 98.5], "higher")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("throughput:-2%", "output_throughput"),
        ("request:-2%", "request_throughput"),
        ("ttft:+5%", "ttft_ms"),
        ("ttft.p99:+5%", "ttft_ms.p99"),
        ("forward_ms.decode.p50:+1.5%", "forward_ms.decode.p50"),
        ("forward_occupancy:-1%", "forward_occupancy"),
    ],
)
def test_metrics_may_be_named_short(text, name):
    assert parse(text).name == name


def test_counts_are_named_by_kind_stream_and_counter():
    assert parse("decode.steady.schedule.h2d:0").place == ("decode.steady", "schedule", "h2d")
    assert parse("mixed.forward.h2d_pageable:+2").sign == "+"


@pytest.mark.parametrize(
    "text",
    ["throughput", "throughput:2%", "throughput:-2", "throughput:fast", "nonsense:-1%", "peak_kv_tokens:+1%",
     "decode.schedule.h2d:5%", "decode.nowhere.h2d:0", ":", ""],
)  # fmt: skip
def test_gates_that_mean_nothing(text):
    with pytest.raises(GateError, match="gate"):
        parse(text)


def test_the_nearest_metric_is_named():
    with pytest.raises(GateError, match="did you mean 'tpot_ms'"):
        parse("tpot_m:-1%")


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("throughput:-4%", "passed"),
        ("throughput:-2%", "inconclusive"),
        ("throughput:-0.5%", "failed"),
        ("throughput:+1%", "passed"),
    ],
)
def test_the_whole_interval_has_to_keep_the_bound(drop, text, outcome):
    found = check(parse(text), {"output_throughput": drop}, a=[], b=[])
    assert (found.outcome, found.seen) == (outcome, -2.0)


def test_a_doubtful_measurement_passes_nothing(drop):
    doubtful = replace(drop, reasons=(Reason.DRIFT,))
    found = check(parse("throughput:-4%"), {"output_throughput": doubtful}, a=[], b=[])
    assert (found.outcome, found.why) == ("inconclusive", "DRIFT")
    assert check(parse("throughput:-4%"), {}, a=[], b=[]).outcome == "inconclusive"


def test_a_change_that_did_nothing_passes_its_gates(drop):
    idle = replace(drop, reasons=(Reason.NOT_ENGAGED,))
    assert check(parse("throughput:-4%"), {"output_throughput": idle}, a=[], b=[]).outcome == "passed"


@pytest.mark.parametrize(
    ("text", "outcome", "seen"),
    [
        ("decode.schedule.d2h:0", "failed", 3),
        ("decode.schedule.d2h:3", "passed", 3),
        ("decode.schedule.d2h:+1", "failed", 2),
        ("decode.schedule.d2h:+2", "passed", 2),
        ("decode.schedule.d2h:-1", "failed", 2),
        ("decode.schedule.d2d:0", "passed", 0),
        ("verify.schedule.d2h:0", "inconclusive", None),
    ],
)
def test_counts_are_those_of_the_worst_step(result, text, outcome, seen):
    tally = {"median": 0.0, "mean": 0.5, "max": 1, "steps_with": 5}
    a = result({"per_step.decode.schedule.d2h": tally})
    b = result({"per_step.decode.schedule.d2h": tally | {"max": 3}})
    found = check(parse(text), {}, a=[a, a], b=[a, b])
    assert (found.outcome, found.seen) == (outcome, seen)
