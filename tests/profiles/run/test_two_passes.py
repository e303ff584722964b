"""A whole run in two passes, on torch's CPU in place of CUDA."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from schedbench.cli.result_page import labels
from schedbench.profiles.platform.resolve import resolve
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Abstained, Metric, Outputs
from schedbench.profiles.run import document
from schedbench.profiles.run.document import agreed, measured
from schedbench.profiles.run.machines import open_machine
from schedbench.profiles.run.runner import GatedSink, PreparedRun, unobserved
from schedbench.scenarios.loader import load
from schedbench.sched.observe import Observer
from tests.profiles.cuda.cpu_machine import cpu_bench

SET = ["workload.requests=3", "workload.prompt_tokens.max=160", "workload.output_tokens.max=8"]


@pytest.fixture
def bench():
    with cpu_bench(resolve(load("mixed", SET))) as bench:
        yield bench


def test_counts_come_from_the_traced_pass_and_times_from_the_timed_one(bench):
    found = measured(bench, unobserved)
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
    assert [record.status for record in found.done.collector.requests.totals.records] == ["finished"] * 3


def test_under_another_profiler_there_is_no_second_pass(bench):
    found = measured(bench, unobserved, traced=False)
    assert found.parts.per_step == {} and found.parts.copies == () and found.parts.syncs == ()
    assert found.passes["abstained"] == "another tool counts"
    assert isinstance(found.outputs, Outputs)


def test_timed_passes_are_repeated_before_the_traced_one(bench):
    found = measured(bench, unobserved, repeat=2)
    assert (found.passes["timed"], found.passes["counts"]) == (2, "traced pass")
    assert {len(metric.values) for metric in found.parts.metrics.values() if isinstance(metric, Metric)} == {
        2
    }
    assert isinstance(found.outputs, Outputs) and found.parts.copies


def test_every_pass_starts_from_an_empty_engine():
    """Otherwise modelled times, which repeat exactly, would differ."""
    question, sink = resolve(load("mixed", SET)), GatedSink()
    with open_machine("vgpu", question, sink) as machine:
        bench = PreparedRun(question, machine, sink)
        bench.warm_up()
        found = measured(bench, unobserved, repeat=3)
    values = [metric.values for metric in found.parts.metrics.values() if isinstance(metric, Metric)]
    assert {(len(one), len(set(one))) for one in values} == {(3, 1)}
    assert isinstance(found.outputs, Outputs)


def test_different_tokens_of_timed_passes_leave_no_digest(bench, monkeypatch):
    digests = iter("aabb")
    monkeypatch.setattr(document, "outputs_of", lambda *_: Outputs(digest=next(digests)))
    found = measured(bench, unobserved, repeat=4, traced=False)
    assert found.outputs == Abstained(abstained="the timed passes gave different tokens")


def test_of_an_interrupted_pass_are_the_requests_and_not_the_times(bench):
    receive, begun = bench.scheduler.receive, []

    def observe(*of):
        begun.append(of)
        return nullcontext(Observer())

    def interrupted():
        if len(begun) == 3:
            raise KeyboardInterrupt
        receive()

    bench.scheduler.receive = interrupted
    found = measured(bench, observe, repeat=5)
    assert (found.passes["timed"], found.done.cancelled) == (2, True)
    assert len(found.parts.metrics["output_throughput"].values) == 2
    assert not any(record.finished for record in found.done.collector.requests.totals.records)
    assert isinstance(found.outputs, Abstained)


def test_an_interruption_between_two_passes_leaves_those_before_it(bench, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.system, "forget", interrupted)
    found = measured(bench, unobserved, repeat=5)
    assert (found.passes["timed"], found.done.cancelled) == (1, True)
    assert all(record.finished for record in found.done.collector.requests.totals.records)
    assert isinstance(found.outputs, Abstained)


@pytest.mark.parametrize(
    ("overrides", "options", "values"),
    [
        (("device.host=measured",), {"repeated": True}, 2),
        (("device.host=measured",), {}, 1),
        (("device.host=measured",), {"repeated": True, "adversary": 0}, 1),
        ((), {"repeated": True}, 1),
    ],
    ids=["measured", "one pass is wanted", "times mean nothing", "exact"],
)
def test_only_measured_times_are_repeated(overrides, options, values):
    question = resolve(load("mixed", [*SET, "measure.repeat=2", *overrides]))
    result = execute(question, Options(device="vgpu", **options))
    lengths = [len(one.values) for name, one in result.metrics.items() if isinstance(one, Metric)]
    assert {*lengths} <= {values}
    assert result.environment.get("passes") == ({"timed": 2} if values == 2 else None)
    remark = "median of 2 passes"
    assert (remark in labels(result.document())) == (values == 2)


def test_a_pass_that_was_interrupted_is_not_counted(bench):
    def interrupted():
        raise KeyboardInterrupt

    bench.scheduler.receive = interrupted
    found = measured(bench, unobserved)
    assert found.passes["abstained"] == "the run was interrupted"
    assert found.parts.per_step == {}
    assert found.parts.copies == found.parts.syncs == ()
    assert isinstance(found.outputs, Abstained)


def test_different_tokens_of_the_passes_leave_no_digest():
    one, other = Outputs(digest="a"), Outputs(digest="b")
    assert agreed(one, one) == one
    assert agreed(one, other) == Abstained(abstained="the timed and the traced pass gave different tokens")
    assert agreed(one, Abstained(abstained="x")) == Abstained(abstained="traced pass: x")
