"""From records and announcements to the parts of a result, and to breaches of a budget."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import pytest
import torch

from schedbench.profiles.measure.collector import LookupCount, ResultParts, RunCollector
from schedbench.profiles.measure.distribution import Distribution
from schedbench.profiles.measure.metrics import plain, request_metrics, time_metric
from schedbench.profiles.measure.requests import RequestLog
from schedbench.profiles.record.result import Abstained, Metric
from schedbench.profiles.record.timeline import Site
from schedbench.profiles.run.document import request_row
from schedbench.sched.config import SamplingParams
from schedbench.sched.observe import LogicalClock, StepInfo
from schedbench.sched.request import Request, Status

SCHEDULE, FORWARD, COPY = 0, 1, 2
SITES = [Site("sched/a.py", "f", number, f"line {number}") for number in range(10)]


class NamesOfTest(NamedTuple):
    sites: Sequence[Site] = SITES
    streams: dict[int, str] = {0: "schedule", 1: "forward", 2: "copy"}  # noqa: RUF012


NAMES = NamesOfTest()


def collected(drawing, cuts=()) -> ResultParts:
    answers = RunCollector(LogicalClock())
    for window in drawing.windows(cuts):
        answers.feed(window)
    return answers.finish(NAMES)


@pytest.fixture
def decodes(drawing):
    """Three decodes, two of them steady; the schedule stream copies once in step 0 and twice in step 1."""
    for step in range(3):
        drawing.forward(10 * step, 10 * step + 8, step=step)
        drawing.step(step, launched=10 * step, settled=10 * step + 9, steady=step > 0)
        drawing.call(10 * step + 5, 10 * step + 9, step=step, waited=4, stream=COPY, site=7)
        drawing.range(10 * step, 10 * step + 10, step=step)
    pageable = {"kind": "h2d", "bytes": 100, "host_memory": "pageable", "blocking": True}
    drawing.op(0, 1, step=0, site=5, **pageable)
    drawing.op(10, 11, step=1, site=5, **pageable)
    drawing.op(11, 12, step=1, site=6, kind="h2d", bytes=1, host_memory="pinned")
    drawing.op(12, 13, step=1, site=6, host_bytes=64)
    return drawing


def test_counts_by_kind_and_stream(decodes):
    parts = collected(decodes)
    assert {kind: counts.steps for kind, counts in parts.per_step.items()} == {
        "decode": 3,
        "decode.steady": 2,
    }
    schedule = parts.per_step["decode"].streams["schedule"]
    assert set(schedule) == {"h2d", "h2d_blocking", "h2d_pageable", "h2d_pinned", "kernel"}
    assert schedule["h2d"].model_dump() == {"median": 1.0, "mean": 1.0, "max": 2, "steps_with": 2}


def test_rows_merge_steady_with_other_decodes(decodes):
    parts = collected(decodes)
    assert [
        (row.site.line, row.kind, row.direction, row.count, row.steady, row.bytes) for row in parts.copies
    ] == [
        (5, "decode", "h2d", 2, 1, 200),
        (6, "decode", "h2d", 1, 1, 1),
        (6, "decode", "kernel", 1, 1, 64),
    ]
    (row,) = parts.syncs
    assert (row.site.line, row.call, row.stream, row.count, row.steady) == (7, "synchronize", "copy", 3, 2)
    assert (row.host_us, row.exposed_us) == (12.0, 2.0)


def test_waiting_in_microseconds_per_step(decodes):
    parts = collected(decodes)
    values = {name: metric.values for name, metric in parts.metrics.items() if hasattr(metric, "values")}
    assert values["forward_occupancy"] == pytest.approx((24 / 28,))
    assert values["gpu_busy"] == pytest.approx((24 / 28,))
    assert values["forward_idle_us_per_step"] == pytest.approx((4 / 3,))
    assert values["forward_gap_us_per_step"] == (0.0,)
    assert values["host_stall_us_per_step"] == (4.0,)
    assert values["exposed_stall_us_per_step"] == pytest.approx((2 / 3,))
    assert values["exposed_host_us_per_step"] == pytest.approx((2 / 3,))
    assert parts.idle.model_dump() == {
        "host_late_us": 4.0,
        "launch_latency_us": 0.0,
        "unnamed_host_us": 0.0,
        "dependency_us": 0.0,
        "kernel_gap_us": 0.0,
        "no_work_us": 0.0,
        "residue_us": 0.0,
    }


def test_forwards_and_the_gaps_inside_them(drawing):
    for step, kind in enumerate(("prefill", "decode", "decode")):
        drawing.forward(100 * step, 100 * step + 10, step=step)
        drawing.forward(100 * step + 13, 100 * step + 20, step=step)
        drawing.step(step, launched=100 * step, settled=100 * step + 30, kind=kind)
    metrics = collected(drawing).metrics
    assert {name: metric.values for name, metric in metrics.items() if name.startswith("forward_ms")} == {
        "forward_ms": (0.02,),
        "forward_ms.decode": (0.02,),
        "forward_ms.prefill": (0.02,),
    }
    assert (metrics["forward_ms.decode"].n, metrics["forward_ms.decode"].p50) == (2, 0.02)
    assert metrics["forward_gap_us_per_step"].values == (3.0,)


def test_the_parts_do_not_depend_on_the_windows(play):
    drawing = play(Random(3), 200)
    assert collected(drawing, range(0, 9000, 37)) == collected(drawing)


def test_requests_become_rows_and_metrics():
    clock = LogicalClock()
    answers = RunCollector(clock)
    request = Request(
        "a", array("q", range(8)), SamplingParams(), arrival=0, cached_tokens=4, first_scheduled_at=500_000
    )
    for instant, token in ((2_000_000, 11), (5_000_000, 12)):
        clock.sleep_until(instant)
        request.output_ids.append(token)
        request.first_token_at = request.first_token_at or instant
        for listener in answers.observers:
            listener.launched(StepInfo(0, "decode", 1, 1, False))
            listener.tokens([request], 1)
    request.status, request.reason, request.finished_at = Status.FINISHED, "length", clock.now()
    for listener in answers.observers:
        listener.ended(request)
    [record] = answers.requests.totals.records
    row = request_row(record, 1_000_000, save_tokens=True)
    assert (row.token_ids, row.status) == ((11, 12), "finished")
    assert (row.arrival, row.first_token, row.finish) == (-1_000_000, 1_000_000, 4_000_000)
    metrics = answers.finish(NAMES).metrics
    assert metrics["ttft_ms"].values == (2.0,)
    assert metrics["tpot_ms"].values == metrics["itl_ms"].values == metrics["step_ms"].values == (3.0,)
    assert metrics["cache_hit_ratio"].values == (0.5,)
    assert metrics["output_throughput"].values == (400.0,)
    assert metrics["queue_ms"].values == (0.5,)


def test_prompts_of_requests_that_were_never_admitted_do_not_count_for_the_cache():
    """One request is admitted with half of its prompt cached, one is refused, and one is aborted in the queue."""
    log = RequestLog(LogicalClock())
    prompt = array("q", range(8))
    for name, admitted, status in (
        ("a", 0, Status.FINISHED),
        ("b", None, Status.REFUSED),
        ("c", None, Status.ABORTED),
    ):
        request = Request(name, prompt, SamplingParams(), arrival=0, first_scheduled_at=admitted)
        request.status, request.cached_tokens = status, 0 if admitted is None else 4
        log.ended(request)
    assert request_metrics(log.totals)["cache_hit_ratio"].values == (0.5,)


def test_metrics_of_admission_abstain_where_no_request_was_admitted():
    log = RequestLog(LogicalClock())
    prompt = array("q", range(8))
    log.ended(Request("a", prompt, SamplingParams(), arrival=0, status=Status.REFUSED))
    metrics = request_metrics(log.totals)
    for name in ("cache_hit_ratio", "queue_ms"):
        assert metrics[name] == Abstained(abstained="no request ran long enough")


def test_metrics_of_an_empty_run_abstain():
    parts = RunCollector(LogicalClock()).finish(NAMES)
    abstained = {name for name, metric in parts.metrics.items() if isinstance(metric, Abstained)}
    assert set(parts.metrics) - abstained == {"retractions", "peak_kv_tokens"}
    assert (parts.per_step, parts.copies) == ({}, ())


def test_a_missing_quantile_has_a_reason():
    metric = time_metric("itl_ms", Distribution([1_000_000] * 19), why="")
    assert metric.p90 == 1.0
    assert metric.p95 == Abstained(abstained="p95 needs 20 samples, there are 19")
    assert plain("retractions", 0).values == (0.0,)


def lookups() -> torch.Tensor:
    return torch.tensor([100, 40])


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def test_metrics_of_lookups_exist_only_with_hot_buffers() -> None:
    plain = RunCollector(LogicalClock()).finish(NAMES).metrics
    assert not any(name.startswith("hisparse") for name in plain)
    counted = lookups()
    answers = RunCollector(LogicalClock(), LookupCount(counted, unchanged, token_bytes=8))
    counted += torch.tensor([4, 1])
    answers.counts.steps["decode"] = 2
    found = answers.finish(NAMES).metrics
    ratio, fetched = found["hisparse_hit_ratio"], found["hisparse_swap_in_bytes_per_step"]
    assert isinstance(ratio, Metric) and ratio.values == (0.75,)
    assert isinstance(fetched, Metric) and fetched.values == (4.0,)


def test_metrics_of_lookups_abstain_without_a_long_request() -> None:
    answers = RunCollector(LogicalClock(), LookupCount(lookups(), unchanged, token_bytes=8))
    found = answers.finish(NAMES).metrics["hisparse_hit_ratio"]
    assert found == Abstained(abstained="no decoding request was longer than its hot buffer")
