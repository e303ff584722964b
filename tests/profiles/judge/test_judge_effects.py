"""The metrics that are read of a result, copies and syncs per step, by line, and the causes of GPU idle time."""

from __future__ import annotations

import json

import pytest

from schedbench.profiles.judge.effects import AddedCount, added, counts, idle, lines, metric_values
from schedbench.profiles.record.result import RankPart
from tests.acceptance.runs import result_of
from tests.profiles.judge.conftest import TALLY
from tests.profiles.judge.synthetic import gated

UNRECORDED = {"copies": [], "syncs": [], "idle": {"abstained": "clocks of their own"}}


def kind(**counters):
    return {"steps": 10, "schedule": {name: TALLY | values for name, values in counters.items()}}


def sync(**fields):
    site = {"file": "a.py", "function": "f", "line": 1, "statement": "x.item()"}
    return {
        "site": site, "range": "prepare", "kind": "decode", "stream": "schedule", "call": "sync", "sync": True,
        "count": 10, "steady": 0, "host_us": 50.0, "exposed_us": 20.0,
    } | fields  # fmt: skip


def synced(*syncs, **counters):
    """Ten decodes with these syncs and no copy."""
    return {"per_step": {"decode": kind(**counters)}, "copies": [], "syncs": list(syncs)}


def test_counts_pool_the_steps_of_all_runs(result):
    a = result({"per_step": {"decode": kind(h2d={})}})
    b = result({"per_step": {"decode": kind(h2d={"median": 3.0, "mean": 3.0, "max": 4})}})
    (found,) = counts([a, a], [a, b])
    assert (found.a.mean, found.b.mean, found.b.max, found.b.median) == (1, 2, 4, 2)
    assert found.change == "more"


def test_a_counter_that_one_side_lacks_is_zero_there(result):
    a = result({"per_step": {"decode": kind(h2d={}, sync={})}})
    b = result({"per_step": {"decode": kind(h2d={})}})
    assert [(c.counter, c.change) for c in counts([a], [b])] == [("h2d", "equal"), ("sync", "fewer")]


def test_a_kind_of_steps_on_one_side_only_is_neither_more_nor_fewer(result):
    a = result({"per_step": {"prefill": kind(h2d={})}, "copies": [], "syncs": []})
    b = result(synced(sync(), sync={}))
    found = counts([a], [b])
    assert [(c.kind, c.a is None, c.b is None, c.change) for c in found] == [
        ("decode", True, False, "no steps"),
        ("prefill", False, True, "no steps"),
    ]
    (line,) = lines([a], [b])
    assert (line.a, line.b, line.exposed_a, line.exposed_b) == (None, 1.0, None, 2.0)


def test_unrecorded_lines_are_not_zero(result):
    a, b = result(synced(sync(), sync={})), result(synced(sync={}) | UNRECORDED)
    assert lines([a], [b]) == lines([b], [a]) == []
    assert counts([a], [b])[0].change == "equal"


def test_an_equal_mean_with_another_distribution_is_moved(result):
    a = result({"per_step": {"decode": kind(h2d={})}})
    b = result({"per_step": {"decode": kind(h2d={"median": 0.0, "max": 10})}})
    assert counts([a], [b])[0].change == "moved"


def test_lines_are_matched_by_statement_and_counted_per_step(result):
    moved = {"file": "a.py", "function": "f", "line": 99, "statement": "x.item()"}
    a = result(synced(sync()))
    b = result(synced(sync(site=moved, count=5, exposed_us=0.0), sync(call="new", count=40)))
    first, second = lines([a], [b])
    assert (first.what, first.a, first.b) == ("new", 0.0, 4.0)
    assert (second.a, second.b, second.exposed_a, second.exposed_b) == (1.0, 0.5, 2.0, 0.0)
    assert second.site.line == 99


def test_waits_of_streams_come_behind_copies_and_syncs(result):
    wait = sync(call="cudaStreamWaitEvent", sync=False, count=40)
    other_batches = sync(call="old", count=1)
    found = lines([result(synced())], [result(synced(wait, sync(call="new"), other_batches))])
    assert [line.what for line in found] == ["new", "cudaStreamWaitEvent", "old"]


@pytest.mark.parametrize("role", ["decode", "pipeline"])
def test_lines_are_per_step_of_all_ranks(result, role):
    abstained = {"value": None, "abstained": "not measured"}
    rank = {"role": role, "per_step": {"decode": kind()}, "idle": abstained, "metrics": {}}
    ranks = [rank | {"name": f"{role} {index}"} for index in (0, 1)]
    ranked = result(synced(sync()) | {"ranks": ranks})
    (line,) = lines([ranked], [ranked])
    assert line.a == 0.5


def test_counts_of_no_step_are_left_out(result):
    a = result(synced(sync(kind="none")))
    assert lines([a], [a]) == []


def test_idle_parts_sum_to_the_total(result):
    parts = {part["part"]: part["a"] for part in idle([result()], [result()])}
    whole = sum(parts[name] for name in ("host_late", "dependency", "kernel_gap", "no_work", "residue"))
    assert whole == pytest.approx(parts["forward_idle"])


def test_idle_time_of_several_ranks_is_their_mean(result):
    whole = json.loads(result().to_json())
    stages = []
    for scale in (1, 3):
        part = whole["metrics"]["forward_idle_us_per_step"]
        metrics = {"forward_idle_us_per_step": part | {"values": [scale * value for value in part["values"]]}}
        stages.append(
            {"name": "s", "role": "pipeline", "per_step": {}, "idle": whole["idle"], "metrics": metrics}
        )
    staged = result({"ranks": stages, "idle": {"abstained": "each rank has its own: see ranks"}})
    parts = {part["part"]: (part["a"], part["b"]) for part in idle([result()], [staged])}
    assert parts["dependency"][0] > 0
    for name in ("forward_idle", "dependency", "host_late"):
        assert parts[name][1] == pytest.approx(2 * parts[name][0])


def test_a_side_without_idle_time_has_no_parts(result):
    silent = result({"idle": {"abstained": "no kernel was seen"}})
    parts = {part["part"]: (part["a"], part["b"]) for part in idle([result()], [silent])}
    assert parts["host_late"][0] is not None and parts["host_late"][1] is None


def test_a_statement_that_was_only_reformatted_is_the_same_line(result):
    shapes = ("x = f(a, dtype=b).to(c)", "x = f( a, dtype=b, ).to(c)", "x = f(a, dtype=d).to(c)")
    site = {"file": "a.py", "function": "f", "line": 1}
    one, same, other = (result(synced(sync(site=site | {"statement": text}), sync={})) for text in shapes)
    assert [(line.a, line.b) for line in lines([one], [same])] == [(1.0, 1.0)]
    assert len(lines([one], [other])) == 2


def test_other_percentiles_are_read_on_request() -> None:
    result = result_of("overlap_on", "workload.requests=12", "workload.output_tokens=4")
    unasked, asked = metric_values(result), metric_values(result, ("e2e_ms.p90",))
    assert {"e2e_ms", "e2e_ms.p50"} <= unasked.keys()
    assert asked.keys() - unasked.keys() == {"e2e_ms.p90"}
    assert unasked["e2e_ms.p50"].value <= asked["e2e_ms.p90"].value


@pytest.mark.parametrize(
    ("changes", "syncs", "more"),
    [
        ({"host_memory": "pageable", "blocking": True}, None, [AddedCount("decode", "sync", 1.0, 1.0)]),
        ({"host_memory": "pageable"}, None, []),
        ({"host_memory": "pageable", "blocking": True}, (), []),  # the wait for an event has gone
    ],
)
def test_a_copy_that_the_host_waits_for_inside_the_call_is_an_added_sync(result, changes, syncs, more):
    a = result()
    copies = tuple(
        row.model_copy(update=changes) if row.host_memory == "pinned" else row for row in a.copies[:3]
    )
    b = a.model_copy(update={"copies": copies, "syncs": a.syncs if syncs is None else syncs})
    assert added([a], [b]) == more


def test_what_a_later_stage_adds_is_added(result):
    """The averages are of all ranks' steps, and what is added of the rank that adds most."""
    one, two = (
        result({"per_step.decode.schedule.sync": TALLY | {"median": n, "mean": n, "max": int(n)}})
        for n in (1.0, 2.0)
    )
    a, b = (
        one.model_copy(update={"ranks": tuple(RankPart.model_construct(per_step=x.per_step) for x in ranks)})
        for ranks in ((one, one), (one, two))
    )
    (changed,) = [count for count in counts([a], [b]) if count.change != "equal"]
    assert (changed.a.mean, changed.b.mean, changed.b.max) == (1.0, 1.5, 2)
    assert added([a], [b]) == [AddedCount("decode", "sync", 1.0, 1.0)]
    outcomes = {gated(gate, {}, a=[a], b=[b]).outcome for gate in ("added:0", "decode.schedule.sync:1")}
    assert outcomes == {"failed"}
