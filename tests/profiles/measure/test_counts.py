"""Copies, syncs and kernels per step and by source line, with known answers."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.profiles.measure.counts import Cost, CountsSink
from schedbench.profiles.measure.steps import TimelineError
from schedbench.profiles.measure.waiting import Waiting, WaitingSink
from schedbench.profiles.record.result import CountSummary
from schedbench.profiles.record.timeline import Range, Records

SCHEDULE, FORWARD, COPY = 0, 1, 2


def counted(drawing, cuts=()) -> tuple[CountsSink, Waiting]:
    waiting = WaitingSink()
    counts = CountsSink(waiting.take_exposed)
    for window in drawing.windows(cuts):
        waiting.feed(window)
        counts.feed(window)
    total = waiting.finish()
    counts.finish()
    return counts, total


def count(drawing, cuts=()) -> CountsSink:
    return counted(drawing, cuts)[0]


def decodes(drawing, steps, *, steady=()):
    for step in range(steps):
        drawing.forward(10 * step, 10 * step + 8, step=step)
        drawing.step(step, launched=10 * step, settled=10 * step + 9, steady=step in steady)


def test_median_mean_max_and_steps_with(drawing):
    decodes(drawing, 4)
    for step, copies in enumerate([0, 1, 1, 4]):
        for _ in range(copies):
            drawing.op(10 * step, 10 * step + 1, step=step, kind="h2d", bytes=8, host_memory="pinned")
    tallies = count(drawing).tallies()
    assert tallies["decode", SCHEDULE, "h2d"] == CountSummary(median=1.0, mean=1.5, max=4, steps_with=3)
    assert tallies["decode", FORWARD, "kernel"] == CountSummary(median=1.0, mean=1.0, max=1, steps_with=4)
    assert ("decode", SCHEDULE, "d2h") not in tallies


def test_a_replayed_graph_counts_as_its_kernels(drawing):
    decodes(drawing, 1)
    drawing.op(0, 8, step=0, stream=FORWARD, kind="kernel", forward=True, kernels=300)
    assert count(drawing).tallies()["decode", FORWARD, "kernel"].max == 301


def test_median_of_an_even_number_of_steps_lies_between(drawing):
    decodes(drawing, 2)
    drawing.op(0, 1, step=0, stream=COPY, kind="d2h", bytes=8)
    assert count(drawing).tallies()["decode", COPY, "d2h"] == CountSummary(
        median=0.5, mean=0.5, max=1, steps_with=1
    )


def test_steady_steps_are_counted_in_both_kinds(drawing):
    decodes(drawing, 3, steady={1, 2})
    drawing.call(0, 1, step=0)
    drawing.call(10, 11, step=1)
    counts = count(drawing)
    assert counts.steps == {"decode": 3, "decode.steady": 2}
    assert counts.tallies()["decode", SCHEDULE, "sync"].steps_with == 2
    assert counts.tallies()["decode.steady", SCHEDULE, "sync"] == CountSummary(
        median=0.5, mean=0.5, max=1, steps_with=1
    )


def test_memory_kind_and_blocking_have_their_own_counters(drawing):
    decodes(drawing, 1)
    drawing.op(0, 1, step=0, kind="h2d", bytes=8, host_memory="pageable", blocking=True)
    drawing.op(1, 2, step=0, kind="h2d", bytes=8, host_memory="pinned")
    tallies = count(drawing).tallies()
    per_counter = {counter: tally.max for (_, on, counter), tally in tallies.items() if on == SCHEDULE}
    assert per_counter == {"h2d": 2, "h2d_pageable": 1, "h2d_pinned": 1, "h2d_blocking": 1}


def test_ops_belong_to_their_step_whenever_they_ran(drawing):
    """The settling of step 0 falls between the launches of steps 1 and 2."""
    decodes(drawing, 3)
    drawing.op(25, 26, step=0, stream=COPY, kind="d2h", bytes=4)
    assert count(drawing).tallies()["decode", COPY, "d2h"].steps_with == 1


def test_copies_by_source_line(drawing):
    decodes(drawing, 2)
    for step in (0, 1):
        at = 10 * step + 6
        copy = {"kind": "h2d", "bytes": 100, "host_memory": "pageable", "blocking": True, "launched": at}
        drawing.op(at, at + 1, step=step, site=5, range="prepare", **copy)
        drawing.call(at, at + 3, step=step, waited=2, kind="copy", site=5, range="prepare")
    line = (5, "prepare", "decode", SCHEDULE, "h2d", "pageable", True)
    assert count(drawing).copies == {line: Cost(count=2, bytes=200, host_ns=4000, exposed_ns=1000)}
    assert count(drawing).calls == {}


def test_syncs_by_source_line_exposed_and_hidden(drawing):
    drawing.forward(0, 10, step=0)
    drawing.forward(16, 20, step=1, launched=15)
    drawing.step(0, launched=0, settled=15)
    drawing.step(1, launched=15, settled=21)
    drawing.call(2, 14, step=0, waited=11, site=9)
    counts = count(drawing)
    line = (9, "settle", "decode", SCHEDULE, "synchronize", True)
    assert counts.calls == {line: Cost(count=1, host_ns=11_000, exposed_ns=4_000)}


def test_a_launch_that_waited_is_listed_but_not_as_a_sync(drawing):
    decodes(drawing, 1)
    drawing.call(0, 5, step=0, waited=4, kind="launch", name="launch")
    drawing.call(5, 6, step=0, kind="launch", name="launch")
    counts = count(drawing)
    assert [(line[4], cost.count) for line, cost in counts.calls.items()] == [("launch", 1)]
    assert ("decode", SCHEDULE, "sync") not in counts.tallies()


def test_waits_of_streams_are_listed_but_not_as_syncs(drawing):
    decodes(drawing, 1)
    for name in ("cudaEventRecord", "cudaStreamWaitEvent"):
        drawing.call(0, 1, step=0, kind="event", name=name, site=7)
    counts = count(drawing)
    line = (7, "settle", "decode", SCHEDULE, "cudaStreamWaitEvent", False)
    assert counts.calls == {line: Cost(count=1)}
    assert ("decode", SCHEDULE, "sync") not in counts.tallies()


def test_copies_by_kernels_count_as_kernels_and_list_their_bytes(drawing):
    decodes(drawing, 1)
    drawing.op(1, 2, step=0, host_bytes=4096, site=3)
    counts = count(drawing)
    assert counts.tallies()["decode", SCHEDULE, "kernel"].max == 1
    line = (3, "", "decode", SCHEDULE, "kernel", "pinned", False)
    assert counts.copies == {line: Cost(count=1, bytes=4096)}


def test_ops_of_no_launched_step_are_counted_apart(drawing):
    decodes(drawing, 1)
    drawing.op(0, 1, step=-1, kind="h2d", bytes=1, site=1)
    drawing.op(0, 1, step=4, kind="h2d", bytes=2, site=1)
    counts = count(drawing)
    assert [(line[2], cost.bytes) for line, cost in counts.copies.items()] == [("none", 3)]
    assert ("none", SCHEDULE, "h2d") not in counts.tallies()


def test_a_copy_after_its_step_is_an_error(drawing):
    decodes(drawing, 12)
    drawing.op(200, 201, step=2, kind="h2d", bytes=1)
    with pytest.raises(TimelineError, match="a record of step 2 arrived after step 3 was complete"):
        count(drawing, cuts=[150_000])


def test_memory_does_not_grow_with_steps(play):
    """Only sums are kept of folded steps."""
    waiting = WaitingSink()
    counts = CountsSink(waiting.take_exposed)
    most = 0
    for window in play(Random(0), 600).windows(range(0, 40_000, 100)):
        waiting.feed(window)
        counts.feed(window)
        tracks = (waiting._sleeps, waiting._stalls, waiting._waits, waiting._others)
        most = max(
            most, len(counts._pending), len(waiting._exposed), *(len(track._items) for track in tracks)
        )
    assert most < 100


def facts(counts: CountsSink) -> tuple:
    return counts.steps, counts.tallies(), counts.copies, counts.calls


@pytest.mark.wide
@given(random=st.randoms(use_true_random=False), cuts=st.lists(st.integers(0, 1500), max_size=40))
@settings(max_examples=60)
def test_counts_do_not_depend_on_the_windows(play, random, cuts):
    drawing = play(random, 30)
    assert facts(count(drawing, cuts)) == facts(count(drawing))


@given(random=st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_counts_of_lines_sum_to_the_total(play, random):
    drawing = play(random, 25)
    (window,) = drawing.windows()
    counts, total = counted(drawing)
    costs = [*counts.copies.values(), *counts.calls.values()]
    assert sum(cost.host_ns for cost in costs) == total.stall
    assert sum(cost.exposed_ns for cost in costs) == total.exposed_stall
    assert sum(cost.bytes for cost in costs) == sum(op.bytes + op.host_bytes for op in window.ops)
    assert sum(cost.count for cost in counts.copies.values()) == sum(
        op.kind in ("h2d", "d2h") for op in window.ops
    )


def test_records_are_made_of_columns_when_they_are_read():
    rows = [("admit", 0, 1, 5, 7), ("prepare", 0, 2, 7, 9), ("model", 1, 2, 9, 12)]
    records = Records.of(Range, rows)
    assert [*records] == [Range(*row) for row in rows] and records[1].name == "prepare"
    assert records.columns.end == (7, 9, 12)
    assert [records.at(places) for places in ([], [2], [0, 2])] == [
        [],
        [records[2]],
        [records[0], records[2]],
    ]
    assert len(Records.of(Range, [])) == 0
