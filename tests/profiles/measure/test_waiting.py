"""Every part of forward idle: hand-drawn timelines with known answers, and a check of each nanosecond."""

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


def watched(drawing, cuts=(), *, noted=None) -> tuple[WaitingSink, Waiting]:
    sink = WaitingSink(noted)
    for window in drawing.windows(cuts):
        sink.feed(window)
    return sink, sink.finish()


def waiting_of(drawing, cuts=()) -> Waiting:
    return watched(drawing, cuts)[1]


def two_steps(drawing, *, start, launched):
    """Forward kernels in [0, 10) and from ``start`` on; the second is enqueued at ``launched``, and the host works
    until then."""
    drawing.forward(0, 10, step=0)
    drawing.forward(start, start + 10, step=1, launched=launched)
    drawing.range(0, launched, step=1)
    drawing.step(0, launched=0, settled=start)
    drawing.step(1, launched=launched, settled=start + 10)


def test_forwards_back_to_back_are_full_occupancy(drawing):
    two_steps(drawing, start=10, launched=5)
    expected = Waiting(steps=2, window=20_000, forward=20_000, busy=20_000)
    assert waiting_of(drawing) == expected


def test_idle_time_has_its_causes_in_their_order(drawing):
    """The forward ends at 10. The host waits until 14, works until 16, sleeps until 24 and works until 26; an event
    holds the next forward until 29. The host's wait from 4 to 10 is hidden by the forward."""
    pieces: list[IdlePiece] = []
    two_steps(drawing, start=30, launched=26)
    drawing.call(3, 14, step=0, waited=10)
    drawing.sleep(16, 24)
    drawing.wait(26, 29, step=1)
    _, waiting = watched(drawing, noted=pieces.append)
    assert pieces == [
        IdlePiece(10_000, 14_000, "exposed_stall", 1),
        IdlePiece(14_000, 16_000, "exposed_host", 1),
        IdlePiece(16_000, 24_000, "no_work", 1),
        IdlePiece(24_000, 26_000, "exposed_host", 1),
        IdlePiece(26_000, 29_000, "dependency", 1),
        IdlePiece(29_000, 30_000, "launch_latency", 1),
    ]
    assert (waiting.stall, waiting.exposed_stall, waiting.exposed_host) == (10_000, 4_000, 4_000)
    assert (waiting.no_work, waiting.dependency, waiting.launch_latency) == (8_000, 3_000, 1_000)
    assert (waiting.host_late, waiting.idle, waiting.residue) == (9_000, 20_000, 0)


def test_host_time_outside_all_records_is_unnamed_work(drawing):
    """Of the 30 us before the enqueue the records cover 6 by a range, 4 by a call beside it and 5 by sleep."""
    drawing.forward(0, 10, step=0)
    drawing.forward(42, 50, step=1, launched=40)
    drawing.step(0, launched=0, settled=60)
    drawing.step(1, launched=40, settled=61)
    drawing.range(8, 16, step=1)
    drawing.range(10, 12, step=1, name="receive")  # inside the other: counted once
    drawing.call(20, 24, step=1, range="", kind="launch")
    drawing.sleep(30, 35)
    waiting = waiting_of(drawing)
    assert (waiting.exposed_host, waiting.no_work, waiting.launch_latency) == (25_000, 5_000, 2_000)
    assert (waiting.unnamed_host, waiting.host_late, waiting.residue) == (15_000, 27_000, 0)


def test_a_stall_during_sleep_gives_a_negative_residue(drawing):
    two_steps(drawing, start=30, launched=30)
    drawing.sleep(12, 20)
    drawing.call(11, 16, step=0, waited=4)
    assert waiting_of(drawing).residue == -4_000


def test_a_forward_held_by_an_event_is_a_dependency(drawing):
    two_steps(drawing, start=20, launched=5)
    drawing.wait(10, 19, step=1)
    drawing.wait(10, 20, step=1, stream=COPY)  # does not hold the forward
    waiting = waiting_of(drawing)
    assert (waiting.dependency, waiting.kernel_gap, waiting.host_late) == (9_000, 1_000, 0)


def test_a_forward_held_by_its_stream_or_another_kernel_is_a_dependency(drawing):
    two_steps(drawing, start=20, launched=5)
    drawing.op(11, 14, step=1, stream=FORWARD, kind="h2d", bytes=8)
    drawing.op(13, 16, step=1, stream=SCHEDULE)
    drawing.op(15, 20, step=1, stream=COPY, kind="d2h", bytes=8)  # a copy elsewhere holds nothing
    waiting = waiting_of(drawing)
    assert (waiting.dependency, waiting.kernel_gap) == (5_000, 5_000)


def test_host_stall_while_the_forward_is_enqueued_is_hidden(drawing):
    two_steps(drawing, start=30, launched=12)
    drawing.wait(12, 30, step=1)
    drawing.call(12, 30, step=0, waited=18)
    waiting = waiting_of(drawing)
    assert (waiting.stall, waiting.exposed_stall, waiting.dependency) == (18_000, 0, 18_000)


def test_gaps_inside_a_span_are_not_forward_idle(drawing):
    drawing.forward(0, 4, step=0)
    drawing.forward(6, 10, step=0)
    drawing.op(5, 6, step=0)
    drawing.op(7, 8, step=0)  # beside a forward kernel: counted once
    drawing.step(0, launched=0, settled=11)
    waiting = waiting_of(drawing)
    assert (waiting.forward, waiting.busy, waiting.idle, waiting.inside) == (10_000, 9_000, 0, 2_000)


def test_gaps_of_overlapping_forwards_are_counted_once(drawing):
    drawing.forward(0, 4, step=0)
    drawing.forward(12, 14, step=0)
    drawing.forward(6, 8, step=1, stream=COPY)
    drawing.forward(18, 20, step=1, stream=COPY)
    drawing.step(0, launched=0, settled=21)
    drawing.step(1, launched=0, settled=22)
    assert waiting_of(drawing).inside == (2 + 4 + 4) * 1000


def test_forward_times_are_kept_by_kind(drawing):
    """A long prefill and a short decode, both enqueued in the prefill's first microseconds."""
    drawing.forward(0, 90, step=0, launched=0)
    drawing.forward(90, 95, step=1, launched=2)
    drawing.step(0, launched=1, settled=91, kind="prefill")
    drawing.step(1, launched=3, settled=96)
    sink, _ = watched(drawing)
    assert {kind: spans.mean for kind, spans in sink.forwards.items()} == {"prefill": 90_000, "decode": 5_000}


ROUNDS = 12


def prompts_beside_decodes(drawing) -> None:
    """Rounds of 60 us. In each a decode begins, then the prefill with the lower number, which outlasts it and another
    decode::

        prefill 3r               |--------------------------------|
        decode 3r+1    |-----------|
        decode 3r+2                        |-----------|
                 0     12        30 32     40          50         60
    """
    for number in range(ROUNDS):
        at, prefill, before, within = 60 * number, 3 * number, 3 * number + 1, 3 * number + 2
        drawing.forward(at + 12, at + 32, step=before, launched=at + 12, stream=COPY)
        drawing.forward(at + 30, at + 60, step=prefill, launched=at + 10)
        drawing.forward(at + 40, at + 50, step=within, launched=at + 35, stream=COPY)
        drawing.step(prefill, launched=at + 10, settled=at + 61, kind="prefill")
        drawing.step(before, launched=at + 13, settled=at + 33)
        drawing.step(within, launched=at + 36, settled=at + 51)


@pytest.mark.parametrize("cuts", [(), range(0, 60_000 * ROUNDS, 7_000), range(0, 60_000 * ROUNDS, 60_500)])
def test_time_in_which_the_forward_of_any_step_ran_is_busy(drawing, cuts):
    prompts_beside_decodes(drawing)
    expected = Waiting(
        steps=3 * ROUNDS,
        window=60_000 * ROUNDS - 12_000,
        forward=48_000 * ROUNDS,
        busy=48_000 * ROUNDS,
        exposed_host=12_000 * (ROUNDS - 1),
        unnamed_host=12_000 * (ROUNDS - 1),
    )
    assert waiting_of(drawing, cuts) == expected


def test_every_step_has_a_period_and_the_periods_leave_out_no_time(drawing):
    prompts_beside_decodes(drawing)
    sink, _ = watched(drawing, range(0, 60_000 * ROUNDS, 7_000))
    periods = sink.take_periods()
    assert Counter(period.kind for period in periods) == {"prefill": ROUNDS, "decode": 2 * ROUNDS}
    assert (periods[0].start, periods[-1].end) == (12_000, 60_000 * ROUNDS)
    assert all(a.end == b.start for a, b in pairwise(periods))
    lengths = [(period.kind, period.end - period.start) for period in periods[3:6]]
    assert lengths == [("decode", 32_000), ("prefill", 28_000), ("decode", 0)]


def test_copies_in_a_forward_range_are_no_forward_kernels(drawing):
    two_steps(drawing, start=10, launched=5)
    drawing.forward(20, 29, step=1, kind="d2h", bytes=8)
    assert waiting_of(drawing).window == 20_000


def test_kernels_outside_the_forward_window_are_not_busy(drawing):
    drawing.op(0, 5, step=0)
    drawing.forward(5, 10, step=0, launched=1)
    drawing.op(10, 12, step=0)
    drawing.step(0, launched=1, settled=12)
    assert waiting_of(drawing).busy == 5_000


def test_an_empty_timeline_has_no_waiting(drawing):
    assert waiting_of(drawing) == Waiting()
    drawing.step(0, launched=1, settled=2, kind="idle")
    assert waiting_of(drawing) == Waiting()


def test_unsettled_steps_of_a_cancelled_run_count_but_no_part_of_a_forward(drawing):
    drawing.forward(0, 10, step=0)
    drawing.forward(12, 20, step=1, launched=12)
    drawing.range(5, 12, step=1)
    drawing.step(0, launched=0, settled=None)
    drawing.step(1, launched=12, settled=None)
    drawing.forward(22, 30, step=2)  # the run broke off before the step was launched
    sink, waiting = watched(drawing)
    assert (waiting.exposed_host, waiting.window, waiting.steps) == (2_000, 20_000, 2)
    assert {kind: len(spans) for kind, spans in sink.forwards.items()} == {"decode": 2}


def test_a_forward_kernel_after_its_step_is_an_error(drawing):
    for step in range(8):
        drawing.forward(10 * step, 10 * step + 5, step=step)
        drawing.step(step, launched=10 * step, settled=10 * step + 6)
    drawing.forward(100, 101, step=1)
    with pytest.raises(TimelineError, match="forward kernel of step 1 arrived after step 3"):
        waiting_of(drawing, cuts=[90_000])


def look_at_each_ns(window) -> Counter[str]:
    """Computes the definitions literally, for each nanosecond."""
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
@settings(max_examples=60)
def test_parts_equal_the_sum_over_each_nanosecond(play, random, steps):
    drawing = play(random, steps)
    waiting = waiting_of(drawing)
    expected = look_at_each_ns(drawing.windows()[0])
    named = expected.pop("named_host", 0)
    assert {part: getattr(waiting, part) for part in expected} == dict(expected)
    assert waiting.exposed_host - waiting.unnamed_host == named
    assert (waiting.residue, waiting.idle) == (0, expected.total() + named)
    assert waiting.host_late == late(drawing.windows()[0])
    assert waiting.inside == gaps_inside(drawing.windows()[0])


def spans_of(window) -> list[list[Op]]:
    """Returns the forward kernels by step, in order of start."""
    forward = [op for op in window.ops if op.forward and op.kind == "kernel"]
    steps = sorted({op.step for op in forward})
    return [sorted((op for op in forward if op.step == step), key=lambda op: op.start) for step in steps]


def late(window) -> int:
    """Idle before enqueues without sleep, and idle from an enqueue to the start for which no record is the cause."""
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
    """The forward of every step is enqueued after the previous one ended, by a host that stalled and worked."""
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


@pytest.mark.wide
def test_memory_and_time_of_late_steps_do_not_grow():
    """A sink that begins late gets the same windows beside it."""
    sink, fresh = WaitingSink(), WaitingSink()
    tracks = [track for track in vars(sink).values() if isinstance(track, IntervalTrack)]
    ratios, kept = [], []
    for first in range(0, STEPS, BLOCK):
        old = time_to_feed(sink, late_steps(first))
        kept.append(max(len(track._items) for track in tracks))
        if first >= 0.9 * STEPS:
            ratios.append(old / time_to_feed(fresh, late_steps(first)))
    assert len(tracks) == 5
    assert max(kept) <= 2 * BLOCK
    assert median(ratios) < 2
    assert sink.finish().exposed_stall == 3 * (STEPS - 1)


def time_to_feed(sink: WaitingSink, window: Window) -> float:
    """Returns seconds of processor time."""
    begin = time.process_time()
    sink.feed(window)
    return time.process_time() - begin


@pytest.mark.wide
@given(random=st.randoms(use_true_random=False), cuts=st.lists(st.integers(0, 1500), max_size=40))
@settings(max_examples=60)
def test_parts_do_not_depend_on_the_windows(play, random, cuts):
    drawing = play(random, 30)
    assert waiting_of(drawing, cuts) == waiting_of(drawing)


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_pieces_of_idle_time_add_up_to_the_totals(seed):
    pieces: list[IdlePiece] = []
    _, waiting = watched(Play(Random(seed)).run(12), noted=pieces.append)
    assert all(a.end <= b.start for a, b in pairwise(pieces))
    assert all(piece.start < piece.end for piece in pieces)
    for cause in CAUSES:
        found = sum(piece.end - piece.start for piece in pieces if piece.cause == cause)
        assert found == getattr(waiting, cause), cause
