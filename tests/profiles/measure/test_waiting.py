"""Every part of forward idle: drawn by hand with known answers, and against a look at each nanosecond."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.profiles.measure.intervals import IntervalTrack
from schedbench.profiles.measure.steps import TimelineError
from schedbench.profiles.measure.waiting import CAUSES, IdlePiece, Waiting, WaitingSink
from schedbench.profiles.record.timeline import Call, Op, Range, Wait, Window
from schedbench.sched.observe import StepInfo
from tests.profiles.measure.conftest import Play

SCHEDULE, FORWARD, COPY = 0, 1, 2


def answer(drawing, cuts=()) -> Waiting:
    sink = WaitingSink()
    for window in drawing.windows(cuts):
        sink.feed(window)
    return sink.finish()


def two_steps(drawing, *, start, launched):
    """Forward kernels in [0, 10) and from ``start`` on; the second enqueued at ``launched``, until when the
    host was at work."""
    drawing.forward(0, 10, step=0)
    drawing.forward(start, start + 10, step=1, launched=launched)
    drawing.range(0, launched, step=1)
    drawing.step(0, launched=0, settled=start)
    drawing.step(1, launched=launched, settled=start + 10)


def test_back_to_back_is_full_occupancy(drawing):
    two_steps(drawing, start=10, launched=5)
    expected = Waiting(steps=2, window=20_000, forward=20_000, busy=20_000)
    assert answer(drawing) == expected


def test_host_work_then_launch_latency(drawing):
    two_steps(drawing, start=18, launched=15)
    waiting = answer(drawing)
    assert (waiting.exposed_host, waiting.launch_latency, waiting.host_late) == (5_000, 3_000, 8_000)
    assert (waiting.idle, waiting.residue) == (8_000, 0)


def test_stall_is_split_into_exposed_and_hidden(drawing):
    """The host waits from 4 to 14; the forward ends at 10: 6 hidden, 4 exposed."""
    two_steps(drawing, start=16, launched=16)
    drawing.call(3, 14, step=0, waited=10)
    waiting = answer(drawing)
    assert (waiting.stall, waiting.exposed_stall, waiting.exposed_host) == (10_000, 4_000, 2_000)


def test_host_time_that_no_record_tells_of_is_unnamed_work(drawing):
    """Of the 30 before the enqueue the records have 6 of a range, 4 of a call beside it and 5 of sleep."""
    drawing.forward(0, 10, step=0)
    drawing.forward(42, 50, step=1, launched=40)
    drawing.range(8, 16, step=1)
    drawing.range(10, 12, step=1, name="receive")  # inside the other: counted once
    drawing.call(20, 24, step=1, range="", kind="launch")
    drawing.sleep(30, 35)
    waiting = answer(drawing)
    assert (waiting.exposed_host, waiting.no_work, waiting.launch_latency) == (25_000, 5_000, 2_000)
    assert (waiting.unnamed_host, waiting.host_late, waiting.residue) == (15_000, 27_000, 0)


def test_a_stall_during_sleep_is_a_contradiction_that_shows(drawing):
    two_steps(drawing, start=30, launched=30)
    drawing.sleep(12, 20)
    drawing.call(11, 16, step=0, waited=4)
    assert answer(drawing).residue == -4_000


def test_launched_early_and_held_by_an_event(drawing):
    two_steps(drawing, start=20, launched=5)
    drawing.wait(10, 19, step=1)
    waiting = answer(drawing)
    assert (waiting.dependency, waiting.kernel_gap, waiting.host_late) == (9_000, 1_000, 0)


def test_a_wait_of_another_stream_does_not_hold_the_forward(drawing):
    two_steps(drawing, start=20, launched=5)
    drawing.wait(10, 19, step=1, stream=COPY)
    assert answer(drawing).kernel_gap == 10_000


def test_held_by_its_own_stream_and_by_a_kernel_of_another(drawing):
    two_steps(drawing, start=20, launched=5)
    drawing.op(11, 14, step=1, stream=FORWARD, kind="h2d", bytes=8)
    drawing.op(13, 16, step=1, stream=SCHEDULE)
    drawing.op(15, 20, step=1, stream=COPY, kind="d2h", bytes=8)  # a copy elsewhere holds nothing
    waiting = answer(drawing)
    assert (waiting.dependency, waiting.kernel_gap) == (5_000, 5_000)


def test_sleep_is_no_work_and_never_exposed(drawing):
    two_steps(drawing, start=50, launched=50)
    drawing.sleep(12, 40)
    waiting = answer(drawing)
    assert (waiting.no_work, waiting.exposed_host, waiting.exposed_stall) == (28_000, 12_000, 0)


def test_host_stall_while_the_forward_is_enqueued_is_hidden(drawing):
    two_steps(drawing, start=30, launched=12)
    drawing.wait(12, 30, step=1)
    drawing.call(12, 30, step=0, waited=18)
    waiting = answer(drawing)
    assert (waiting.stall, waiting.exposed_stall, waiting.dependency) == (18_000, 0, 18_000)


def test_gaps_inside_a_span_are_apart_from_forward_idle(drawing):
    drawing.forward(0, 4, step=0)
    drawing.forward(6, 10, step=0)
    drawing.op(5, 6, step=0)
    drawing.op(7, 8, step=0)  # beside a forward kernel: counted once
    drawing.step(0, launched=0, settled=11)
    waiting = answer(drawing)
    assert (waiting.forward, waiting.busy, waiting.idle, waiting.inside) == (10_000, 9_000, 0, 2_000)


def test_forwards_that_overlap_leave_no_gap_twice(drawing):
    drawing.forward(0, 4, step=0)
    drawing.forward(12, 14, step=0)
    drawing.forward(6, 8, step=1, stream=COPY)
    drawing.forward(18, 20, step=1, stream=COPY)
    assert answer(drawing).inside == (2 + 4 + 4) * 1000


def test_the_length_of_a_forward_is_told_of_its_own_kind(drawing):
    """A long prefill and a short decode, both enqueued in the prefill's first microseconds."""
    drawing.forward(0, 90, step=0, launched=0)
    drawing.forward(90, 95, step=1, launched=2)
    drawing.step(0, launched=1, settled=91, kind="prefill")
    drawing.step(1, launched=3, settled=96)
    sink = WaitingSink()
    for window in drawing.windows():
        sink.feed(window)
    sink.finish()
    assert {kind: spans.mean for kind, spans in sink.forwards.items()} == {"prefill": 90_000, "decode": 5_000}


def test_copies_in_a_forward_range_are_no_forward_kernels(drawing):
    two_steps(drawing, start=10, launched=5)
    drawing.forward(20, 29, step=1, kind="d2h", bytes=8)
    assert answer(drawing).window == 20_000


def test_kernels_outside_the_forward_window_are_not_busy(drawing):
    drawing.op(0, 5, step=0)
    drawing.forward(5, 10, step=0, launched=1)
    drawing.op(10, 12, step=0)
    drawing.step(0, launched=1, settled=12)
    assert answer(drawing).busy == 5_000


def test_nothing_happened(drawing):
    assert answer(drawing) == Waiting()
    drawing.step(0, launched=1, settled=2, kind="idle")
    assert answer(drawing) == Waiting()


def test_unsettled_steps_of_a_cancelled_run_count(drawing):
    drawing.forward(0, 10, step=0)
    drawing.forward(12, 20, step=1, launched=12)
    drawing.range(5, 12, step=1)
    assert answer(drawing).exposed_host == 2_000


def test_a_forward_kernel_after_its_step_is_an_error(drawing):
    for step in range(8):
        drawing.forward(10 * step, 10 * step + 5, step=step)
        drawing.step(step, launched=10 * step, settled=10 * step + 6)
    drawing.forward(100, 101, step=1)
    with pytest.raises(TimelineError, match="forward kernel of step 1 arrived after step 3"):
        answer(drawing, cuts=[90_000])


def look_at_each_ns(window) -> Counter[str]:
    """The definitions, literally."""
    spans = {}
    forward = [op for op in window.ops if op.forward and op.kind == "kernel"]
    for op in sorted(forward, key=lambda op: op.start):
        first = spans.setdefault(op.step, [op, op.start, op.end])
        first[2] = max(first[2], op.end)
    ordered = [spans[step] for step in sorted(spans)]
    parts: Counter[str] = Counter()
    for (_, _, gap_start), (first, gap_end, _) in pairwise(ordered):
        for t in range(gap_start, gap_end):
            parts[part_of(t, window, first=first, late=first.launched > gap_start)] += 1
    return parts


def part_of(t, window, *, first, late) -> str:
    if t < first.launched:
        if any(r.start <= t < r.end for r in window.ranges if r.name == "sleep"):
            return "no_work"
        if any(call.end - call.waited <= t < call.end for call in window.calls):
            return "exposed_stall"
        at_work = any(r.start <= t < r.end for r in window.ranges)
        return "named_host" if at_work else "unnamed_host"
    held = any(w.stream == first.stream and w.start <= t < w.end for w in window.waits) or any(
        op.start <= t < op.end and (op.kind == "kernel" or op.stream == first.stream) for op in window.ops
    )
    if held:
        return "dependency"
    return "launch_latency" if late else "kernel_gap"


@given(random=st.randoms(use_true_random=False), steps=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_parts_are_what_each_nanosecond_says(play, random, steps):
    drawing = play(random, steps)
    waiting = answer(drawing)
    expected = look_at_each_ns(drawing.windows()[0])
    named = expected.pop("named_host", 0)
    assert {part: getattr(waiting, part) for part in expected} == dict(expected)
    assert waiting.exposed_host - waiting.unnamed_host == named
    assert (waiting.residue, waiting.idle) == (0, expected.total() + named)
    assert waiting.host_late == late(drawing.windows()[0])
    assert waiting.inside == gaps_inside(drawing.windows()[0])


def spans_of(window) -> list[list[Op]]:
    """Forward kernels by step, in order of start."""
    forward = [op for op in window.ops if op.forward and op.kind == "kernel"]
    steps = sorted({op.step for op in forward})
    return [sorted((op for op in forward if op.step == step), key=lambda op: op.start) for step in steps]


def late(window) -> int:
    """Idle before enqueues without sleep, and from an enqueue to the start what nothing held."""
    total = 0
    for before, after in pairwise(spans_of(window)):
        begin, first = max(op.end for op in before), after[0]
        if first.launched > begin:
            parts = Counter(
                part_of(t, window, first=first, late=True) in ("no_work", "dependency")
                for t in range(begin, first.start)
            )
            total += parts[False]
    return total


def gaps_inside(window) -> int:
    """Nanoseconds of a step's span in which none of its forward kernels ran; spans do not overlap here."""
    return sum(
        not any(op.start <= t < op.end for op in ops)
        for ops in spans_of(window)
        for t in range(ops[0].start, max(op.end for op in ops))
    )


STEPS = 40_000
BLOCK = 100  # steps of a window


def late_steps(first: int) -> Window:
    """Every step's forward is enqueued after the one before it ended, by a host that stalled and worked."""
    window = Window(100 * first, 100 * (first + BLOCK))
    for step in range(first, first + BLOCK):
        at = 100 * step
        kernel = Op(
            "kernel", "k", FORWARD, at + 50, at + 90, 0, 0, "", False, "model", True, step, -1, at + 50
        )
        copy = kernel._replace(kind="h2d", stream=SCHEDULE, forward=False, start=at + 10, end=at + 12)
        window.ops += [copy, kernel]
        window.calls.append(Call("sync", "s", at + 1, at + 5, 3, SCHEDULE, "prepare", step, -1))
        window.waits.append(Wait(COPY, at + 20, at + 30, step))
        window.ranges += [Range("sleep", -1, 0, at + 5, at + 6), Range("prepare", step, 1, at + 6, at + 50)]
        info = StepInfo(step, "decode", 1, 1, False)
        window.launched.append(info)
        window.settled.append(info)
    return window


def test_a_long_run_of_late_steps_is_neither_kept_nor_slower_by_the_hour():
    """Beside it, a sink that begins late gets the same windows."""
    sink, fresh = WaitingSink(), WaitingSink()
    tracks = [track for track in vars(sink).values() if isinstance(track, IntervalTrack)]
    ratios, kept = [], []
    for first in range(0, STEPS, BLOCK):
        old = time_to_feed(sink, late_steps(first))
        kept.append(max(map(len, tracks)))
        if first >= 0.9 * STEPS:
            ratios.append(old / time_to_feed(fresh, late_steps(first)))
    assert len(tracks) == 5
    assert max(kept) <= 2 * BLOCK
    assert median(ratios) < 2
    assert sink.finish().exposed_stall == 3 * (STEPS - 1)


def time_to_feed(sink: WaitingSink, window: Window) -> float:
    """Seconds of processor time."""
    begin = time.process_time()
    sink.feed(window)
    return time.process_time() - begin


@given(random=st.randoms(use_true_random=False), cuts=st.lists(st.integers(0, 1500), max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_cutting_into_windows_gives_the_same(play, random, cuts):
    drawing = play(random, 30)
    assert answer(drawing, cuts) == answer(drawing)


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_pieces_of_idle_time_add_up_to_the_totals(seed):
    pieces: list[IdlePiece] = []
    sink = WaitingSink(pieces.append)
    for window in Play(Random(seed)).run(12).windows():
        sink.feed(window)
    waiting = sink.finish()
    assert all(a.end <= b.start for a, b in pairwise(pieces))
    assert all(piece.start < piece.end for piece in pieces)
    for cause in CAUSES:
        found = sum(piece.end - piece.start for piece in pieces if piece.cause == cause)
        assert found == getattr(waiting, cause), cause


def test_a_piece_of_idle_time_has_its_cause_and_the_step_behind_it(drawing):
    """The forward ends at 10; the host waits until 14 and works until 16; an event holds the next forward until 19."""
    pieces: list[IdlePiece] = []
    sink = WaitingSink(pieces.append)
    two_steps(drawing, start=20, launched=16)
    drawing.call(3, 14, step=0, waited=10)
    drawing.wait(16, 19, step=1)
    for window in drawing.windows():
        sink.feed(window)
    sink.finish()
    assert pieces == [
        IdlePiece(10_000, 14_000, "exposed_stall", 1),
        IdlePiece(14_000, 16_000, "exposed_host", 1),
        IdlePiece(16_000, 19_000, "dependency", 1),
        IdlePiece(19_000, 20_000, "launch_latency", 1),
    ]
