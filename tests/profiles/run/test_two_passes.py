"""A whole run in two passes, on torch's CPU in place of CUDA."""

from __future__ import annotations

import pytest

from schedbench.profiles.platform.resolve import resolve
from schedbench.profiles.record.result import Abstained, Outputs
from schedbench.profiles.run.document import agreed, measured
from schedbench.profiles.run.runner import unobserved
from schedbench.scenarios.loader import load
from tests.profiles.cuda.cpu_machine import cpu_bench

SET = ["workload.requests=3", "workload.prompt_tokens.max=160", "workload.output_tokens.max=8"]


@pytest.fixture
def bench():
    with cpu_bench(resolve(load("mixed", SET))) as bench:
        yield bench


def test_counts_come_from_the_traced_pass_and_times_from_the_timed_one(bench):
    done = bench.measure(unobserved)
    found = measured(bench, done)
    assert isinstance(found.outputs, Outputs)
    assert found.passes["counts"] == "traced pass"
    assert found.passes["trace_overhead"] > 0
    assert "abstained" not in found.passes
    occupancy = found.parts.metrics["forward_occupancy"]
    assert 0 < occupancy.values[0] <= 1
    for counts in found.parts.per_step.values():
        schedule = counts.streams["schedule"]
        assert schedule["h2d"] == schedule["sync"]
        assert "kernel" not in schedule, "the span of the timed pass is no kernel"
    assert {(row.stream, row.direction, row.blocking) for row in found.parts.copies} == {
        ("schedule", "h2d", True)
    }
    assert [record.status for record in done.collector.requests.totals.records] == ["finished"] * 3


def test_under_another_profiler_there_is_no_second_pass(bench):
    found = measured(bench, bench.measure(unobserved), traced=False)
    assert found.parts.per_step == {} and found.parts.copies == () and found.parts.syncs == ()
    assert found.passes["abstained"] == "another tool counts"
    assert isinstance(found.outputs, Outputs)


def test_a_pass_that_was_interrupted_is_not_counted(bench):
    def interrupted():
        raise KeyboardInterrupt

    bench.scheduler.receive = interrupted
    found = measured(bench, bench.measure(unobserved))
    assert found.passes["abstained"] == "the run was interrupted"
    assert found.parts.per_step == {}
    assert found.parts.copies == found.parts.syncs == ()
    assert isinstance(found.outputs, Abstained)


def test_different_tokens_of_the_passes_leave_no_digest():
    one, other = Outputs(digest="a"), Outputs(digest="b")
    assert agreed(one, one) == one
    assert agreed(one, other) == Abstained(abstained="the timed and the traced pass gave different tokens")
    assert agreed(one, Abstained(abstained="x")) == Abstained(abstained="traced pass: x")
