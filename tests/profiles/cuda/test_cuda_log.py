"""The parts that the join rests on: the history of changes, names of streams, the clock."""

from __future__ import annotations

import threading
import time
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedbench.profiles.cuda.kineto import rows
from schedbench.profiles.cuda.log import NO_CONTEXT, History, Log, StreamTable, WallClock
from schedbench.profiles.cuda.machine import driver, streams_in_order
from schedbench.profiles.cuda.watch import LoggedRange, this_thread


@given(st.lists(st.integers(0, 30), max_size=20).map(sorted), st.integers(-1, 31))
def test_a_history_holds_the_last_change_before_an_instant(instants, asked):
    history = History(-1)
    for index, instant in enumerate(instants):
        history.change(instant, index)
    before = [index for index, instant in enumerate(instants) if instant <= asked]
    assert history.at(asked) == (before[-1] if before else -1)
    assert history.current == len(instants) - 1


def test_the_end_of_a_range_restores_the_outer_one(clock):
    log = Log()
    outer = NO_CONTEXT.inside("model", 1)
    with LoggedRange(log, clock, outer, 4, None):
        inner = log.contexts.current.inside("mine", 1)
        with LoggedRange(log, clock, inner, 2, None):
            assert log.contexts.current == inner
        assert log.contexts.current == outer
    assert log.contexts.current == ("", 1, False), "what follows belongs to the step, and to no range"
    assert [(r.name, r.size) for r in log.ranges] == [("mine", 2), ("model", 4)]
    assert inner.forward, "a range of unknown name is of the category around it"


def test_a_schedule_range_inside_a_forward_belongs_to_the_schedule():
    assert not NO_CONTEXT.inside("model", 1).inside("settle", 0).forward


def test_a_stream_keeps_its_last_name():
    table = StreamTable()
    for name in ("copy", "forward", "schedule"):
        table.announce(name, 0)
    assert table.names == {0: "schedule"}
    assert table.handles() == [0]


def test_an_unnamed_stream_keeps_its_cupti_number():
    table = StreamTable()
    assert table.by_cupti(20) == table.by_cupti(20)
    assert table.names[table.by_cupti(20)] == "stream 20"


def test_streams_are_matched_in_the_order_of_their_first_use(trace):
    for stream, at in ((13, 10), (7, 0), (13, 20), (21, 15)):
        trace.launch(at, stream=stream)
    assert streams_in_order(rows(trace.document())) == [7, 13, 21]


def test_the_clock_counts_from_its_start_and_has_the_epoch():
    begin = time.perf_counter_ns()
    clock = WallClock()
    assert 0 <= clock.now() <= time.perf_counter_ns() - begin
    epochs = [clock.epoch for _ in range(9)]
    before = time.time_ns()
    now = clock.now()
    assert before - 10**6 < median(epochs) + now < time.time_ns() + 10**6


@pytest.mark.parametrize("ahead", [-1000, 50_000, 1_500_000])
def test_sleep_ends_no_earlier_than_its_time(ahead):
    clock = WallClock()
    at = clock.now() + ahead
    clock.sleep_until(at)
    assert clock.now() >= at


def test_a_thread_has_several_numbers():
    assert {threading.get_native_id()} < this_thread()


def test_this_torch_has_the_options_of_the_trace():
    options = torch._C._profiler._ExperimentalConfig
    assert options(enable_cuda_sync_events=True, expose_kineto_event_metadata=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Apr 1\nGCC version: 12",
            "580.159.03",
        ),
        ("nothing here", "unknown"),
    ],
)
def test_the_driver_reports_its_version(tmp_path, text, expected):
    path = tmp_path / "version"
    path.write_text(text)
    assert driver(path) == expected
    assert driver(tmp_path / "absent") == "unknown"
