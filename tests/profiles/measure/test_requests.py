"""Latency, throughput and usage of hand-written request records."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedbench.profiles.measure.distribution import Distribution, needed
from schedbench.profiles.measure.metrics import (
    of_passes,
    plain,
    rates,
    steady_rates,
    steady_window,
    time_metric,
)
from schedbench.profiles.measure.requests import RequestLog, RequestRecord, between, tpot
from schedbench.profiles.measure.steps import SleepAnnouncingClock, StepPeriods
from schedbench.profiles.record.result import Abstained
from schedbench.sched.config import SamplingParams
from schedbench.sched.observe import LogicalClock, Observer, StepInfo
from schedbench.sched.request import Request, Status

S = 1_000_000_000


def record(
    index, *, arrival, scheduled, first, finish, prompt=10, output=5, status="finished"
) -> RequestRecord:
    return RequestRecord(
        id=f"r{index}",
        index=index,
        arrival=arrival,
        first_scheduled=scheduled,
        first_token=first,
        finish=finish,
        prompt_tokens=prompt,
        cached_tokens=0,
        output_ids=array("q", range(output)),
        status=status,
        reason="length",
    )


@pytest.fixture
def records() -> list[RequestRecord]:
    return [
        record(0, arrival=0, scheduled=1 * S, first=2 * S, finish=6 * S),
        record(1, arrival=1 * S, scheduled=2 * S, first=5 * S, finish=5 * S, output=1),
        record(2, arrival=2 * S, scheduled=None, first=None, finish=2 * S, output=0, status="refused"),
    ]


@pytest.fixture
def clock() -> LogicalClock:
    return LogicalClock()


@pytest.fixture
def request_of_three() -> Request:
    return Request("a", array("q", range(8)), SamplingParams(), arrival=0, cached_tokens=4)


def test_latencies_of_finished_requests(records):
    assert between(records, "arrival", "first_token").mean == 3 * S
    assert between(records, "arrival", "first_scheduled").mean == 1 * S
    assert between(records, "arrival", "finish").max == 6 * S
    assert (len(tpot(records)), tpot(records).mean) == (1, 1 * S)


def test_throughput_over_the_full_window(records):
    assert rates(records, Counter({5 * S: 6})) == {
        "output_throughput": 1.0,
        "input_throughput": 20 / 6,
        "total_throughput": pytest.approx(26 / 6),
        "request_throughput": 2 / 6,
    }


def test_throughput_of_no_time_abstains():
    assert {*rates([], Counter()).values()} == {None}
    assert {*rates([record(0, arrival=3, scheduled=3, first=3, finish=3)], Counter()).values()} == {None}
    assert steady_window([]) is None
    assert {*steady_rates([], Counter()).values()} == {None}


def test_steady_window_is_the_longest_above_half_of_the_peak():
    """Running: 1 from 0, 2 from 10, 4 at 11..12, 1 from 12, 2 from 20 to 90, 1 to 100. Half of the peak is 2."""
    spans = [(0, 90), (10, 12), (11, 12), (11, 12), (20, 100)]
    records = [record(i, arrival=0, scheduled=a, first=a, finish=b) for i, (a, b) in enumerate(spans)]
    assert steady_window(records) == (20, 90)


def test_steady_window_prefers_the_earlier_of_equals():
    spans = [(0, 10), (20, 30)]
    records = [record(i, arrival=0, scheduled=a, first=a, finish=b) for i, (a, b) in enumerate(spans)]
    assert steady_window(records) == (0, 10)


def test_steady_throughput_counts_tokens_within_the_window():
    records = [record(0, arrival=0, scheduled=S, first=S, finish=3 * S)]
    tokens = Counter({second * S: count for second, count in ((1, 7), (2, 10), (3, 20), (4, 40))})
    found = steady_rates(records, tokens)
    assert found == {"steady_output_throughput": 15.0, "steady_request_throughput": 0.5}


def test_itl_is_a_gap_between_events_of_any_size(clock, request_of_three):
    log = RequestLog(clock)
    for instant, count in ((10, 1), (14, 3), (20, 1)):
        clock.sleep_until(instant)
        log.tokens([request_of_three], count)
    request_of_three.status = Status.FINISHED
    log.ended(request_of_three)
    assert (len(log.totals.gaps), log.totals.gaps.min, log.totals.gaps.max) == (2, 4, 6)
    assert log.totals.tokens.total() == 5


def test_itl_of_requests_that_join_and_leave_a_batch(clock):
    log = RequestLog(clock)
    stays, leaves = (Request(name, array("q", [1]), SamplingParams(), arrival=0) for name in "ab")
    batches = {
        10: [stays],
        11: [stays, leaves],
        13: [stays, leaves],
        16: [stays],
        20: [leaves, stays],
        25: [stays],
    }
    for instant, batch in batches.items():
        clock.sleep_until(instant)
        log.tokens(batch, 1)
        for request in (leaves,) if instant == 20 else (stays,) if instant == 25 else ():
            request.status = Status.FINISHED
            log.ended(request)
    gaps = log.totals.gaps
    assert (len(gaps), gaps.mean * len(gaps)) == (2 + 5, (2 + 7) + (1 + 2 + 3 + 4 + 5))
    assert log.totals.tokens == {10: 1, 11: 2, 13: 2, 16: 1, 20: 2, 25: 1}


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED, Status.CANCELLED])
def test_itl_counts_finished_requests_only(clock, request_of_three, status):
    log = RequestLog(clock)
    for instant in (10, 14):
        clock.sleep_until(instant)
        log.tokens([request_of_three], 1)
    request_of_three.status = status
    log.ended(request_of_three)
    assert (len(log.totals.gaps), log.totals.tokens.total()) == (0, 2)


def test_requests_are_logged_when_they_end(clock, request_of_three):
    log = RequestLog(clock)
    request_of_three.status, request_of_three.finished_at = Status.FINISHED, 30
    log.ended(request_of_three)
    log.ended(Request("b", array("q"), SamplingParams(), arrival=5, index=-1, status=Status.REFUSED))
    log.retracted(request_of_three)
    for used in (10, 40, 20):
        log.kv_usage(used)
    assert [entry.id for entry in log.totals.in_order()] == ["b", "a"]
    assert [entry.finished for entry in log.totals.records] == [True, False]
    assert (log.totals.retractions, log.totals.peak_kv_tokens, log.totals.records[0].cached_tokens) == (
        1,
        40,
        4,
    )


def test_step_periods_without_sleep(clock):
    periods = StepPeriods(clock)
    sleepy = SleepAnnouncingClock(clock, periods)
    for instant, kind in ((0, "prefill"), (10, "decode"), (11, "prebuilt"), (13, "decode")):
        clock.sleep_until(instant)
        periods.launched(StepInfo(0, kind, 1, 1, False))
    sleepy.sleep_until(1000)
    periods.launched(StepInfo(0, "decode", 1, 1, False))
    assert (len(periods.periods), periods.periods.min, periods.periods.max) == (2, 3, 10)
    assert sleepy.now() == 1000


def test_a_sleep_of_no_time_does_not_interrupt_a_period(clock):
    periods = StepPeriods(clock)
    sleepy = SleepAnnouncingClock(clock, periods)
    periods.launched(StepInfo(0, "decode", 1, 1, False))
    clock.sleep_until(10)
    sleepy.sleep_until(10)
    periods.launched(StepInfo(1, "decode", 1, 1, False))
    assert (len(periods.periods), periods.periods.mean) == (1, 10)


def test_sleep_is_a_range(clock):
    class RangeNames(Observer):
        def __init__(self):
            self.heard = []

        def range(self, name, step, size):
            self.heard.append((name, step, size))
            return super().range(name, step, size)

    observer = RangeNames()
    SleepAnnouncingClock(clock, observer).sleep_until(7)
    assert (observer.heard, clock.now()) == ([("sleep", -1, 0)], 7)


@pytest.mark.parametrize(("quantile", "n"), [(0.5, 2), (0.9, 10), (0.95, 20), (0.99, 100)])
def test_quantiles_are_refused_below_the_samples_that_support_them(quantile, n):
    assert needed(quantile) == n
    assert Distribution(range(n - 1)).quantile(quantile) is None
    assert Distribution(range(n)).quantile(quantile) is not None


@given(
    st.sampled_from([5, 10**12]).flatmap(
        lambda most: st.lists(st.integers(0, most), min_size=100, max_size=300)
    ),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
def test_quantiles_agree_with_numpy(samples, quantile):
    mine = Distribution(samples)
    assert mine.quantile(quantile) == pytest.approx(
        float(numpy.quantile(samples, quantile)), rel=1e-9, abs=1e-3
    )
    assert (mine.min, mine.max, len(mine)) == (min(samples), max(samples), len(samples))
    assert mine.mean == pytest.approx(sum(samples) / len(samples))


def test_metrics_of_several_passes_have_a_value_for_each_that_measured_them():
    samples = [Distribution(range(first, last)) for first, last in ((0, 20), (3, 9), (5, 45))]
    passes = [{"step_ms": time_metric("step_ms", one, why="")} for one in samples]
    passes[0] |= {
        "gpu_busy": plain("gpu_busy", None, why="first"),
        "accept_length": plain("accept_length", 2),
    }
    passes[2] |= {"gpu_busy": plain("gpu_busy", None, why="last")}
    found = of_passes(passes)
    assert of_passes(passes[:1]) == passes[0]
    assert (found["gpu_busy"], found["accept_length"].value) == (Abstained(abstained="last"), 2)
    step = found["step_ms"]
    assert step.values == tuple(one["step_ms"].value for one in passes) and step.value == 9.5e-6
    assert (step.n, step.min, step.max) == (20, 0, 44e-6)
    assert step.p50 == 9.5e-6 and step.p95 == pytest.approx((18.05e-6 + 42.05e-6) / 2)
    assert isinstance(step.p99, Abstained)
