"""The span of each step's forward, from two events on another clock."""

from __future__ import annotations

import pytest

from schedbench.profiles.cuda.watch import BATCH, StepSpans


class Gpu:
    """A device whose clock is ``offset`` behind the host's and gains ``ppm`` on it; events happen when recorded."""

    def __init__(self, clock, *, offset=12345, ppm=0):
        self.clock, self.offset, self.ppm = clock, offset, ppm
        self.made = 0

    def now(self):
        return self.clock.at * (1 + self.ppm / 1e6) - self.offset

    def event(self):
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = self.gpu.now()

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e6


@pytest.fixture
def gpu(clock):
    return Gpu(clock)


@pytest.fixture
def spans(gpu, clock):
    return StepSpans(gpu.event, lambda: 2, lambda: None, clock)


def run(spans, clock, steps, *, each=1000):
    for step in steps:
        clock.at += each
        spans.open(step)
        clock.at += each
        spans.close(step)
        spans.settled(step)


def test_spans_are_converted_to_the_hosts_clock(spans, clock):
    spans.anchor()
    run(spans, clock, range(3))
    clock.at += 500
    spans.anchor()
    assert [(op.step, op.start, op.end) for op in spans.ops()] == [
        (0, 1000, 2000),
        (1, 3000, 4000),
        (2, 5000, 6000),
    ]
    assert {(op.kind, op.stream, op.forward) for op in spans.ops()} == {("kernel", 2, True)}


def test_clock_drift_is_corrected(clock):
    gpu = Gpu(clock, ppm=50)
    spans = StepSpans(gpu.event, lambda: 0, lambda: None, clock)
    spans.anchor()
    run(spans, clock, range(10), each=10**8)
    spans.anchor()
    assert all(abs(op.start - op.launched) < 100 for op in spans.ops())


def test_the_first_range_opens_a_span_and_the_last_end_closes_it(spans, clock):
    spans.anchor()
    for at, call in ((10, spans.open), (20, spans.open), (30, spans.close), (50, spans.close)):
        clock.at = at
        call(0)
    spans.anchor()
    (op,) = spans.ops()
    assert (op.start, op.end, op.launched) == (10, 50, 10)


def test_a_step_that_never_ended_has_no_span(spans, clock):
    spans.anchor()
    run(spans, clock, range(2))
    spans.open(2)
    spans.anchor()
    assert [op.step for op in spans.ops()] == [0, 1]


def test_events_are_reused(spans, gpu, clock):
    spans.anchor()
    run(spans, clock, range(5 * BATCH))
    spans.anchor()
    assert len(spans.ops()) == 5 * BATCH
    assert gpu.made < 3 * BATCH
