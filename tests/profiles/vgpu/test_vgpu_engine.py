"""The simulation compared with a slow, eager oracle, and with results by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schedbench.profiles.vgpu.engine import (
    COMPUTE,
    D2H,
    FOREVER,
    H2D,
    EventRecording,
    Replay,
    Simulation,
    StreamQueue,
)

GAP, GRAPH_GAP = 10, 5


@dataclass
class Action:
    """An action of the host, ``delay`` after the previous one."""

    kind: str  # op, graph, record, wait, settle, sync
    queue: int
    delay: int
    engine: int = COMPUTE
    durations: tuple[int, ...] = (0,)
    event: int = 0


@dataclass
class Outcome:
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)  # by serial, of ops and whole graphs
    nodes: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


def simulate(actions: list[Action], *, node_trace: bool, settles: bool) -> Outcome:
    """Runs the simulation under test. Without ``settles`` it leaves out the settling, which must not matter."""
    simulation, outcome, now = Simulation(gap=GAP), Outcome(), 0
    queues = [simulation.queue() for _ in range(3)]
    marks: list[EventRecording] = []
    for serial, action in enumerate(actions):
        now += action.delay
        queue = queues[action.queue]
        if action.kind == "op":
            row = (serial, 0)
            simulation.submit(queue, action.engine, now=now, duration=action.durations[0], row=row)
        elif action.kind == "graph":
            submit_graph(simulation, queue, now, serial, action.durations, node_trace=node_trace)
        elif action.kind == "record":
            marks.append(simulation.record(queue, now))
        elif action.kind == "wait" and marks:
            simulation.wait_event(queue, marks[-1 - action.event % len(marks)])
        elif action.kind == "settle" and settles:
            simulation.run(now)
        elif action.kind == "sync":
            now = max(now, simulation.wait(simulation.record(queue, now)))
            outcome.host.append(now)
    simulation.drain()
    assert simulation.pending == 0
    for row, start, end in simulation.served:
        outcome.nodes[row] = (start, end)
        first, last = outcome.spans.get(row[0], (start, end))
        outcome.spans[row[0]] = (min(first, start), max(last, end))
    outcome.marks = [mark.time for mark in marks if mark.time is not None]
    assert len(outcome.marks) == len(marks)
    return outcome


def submit_graph(
    simulation: Simulation,
    queue: StreamQueue,
    now: int,
    serial: int,
    durations: tuple[int, ...],
    *,
    node_trace: bool,
) -> None:
    begins = np.array([0, *itertools.accumulate(duration + GRAPH_GAP for duration in durations)])
    rows = [(serial, k) for k in range(len(durations))] if node_trace else ()
    replay = Replay(lambda: begins, len(durations), GRAPH_GAP, (serial, 0), rows)
    simulation.submit(queue, COMPUTE, now=now, duration=int(begins[-1]) - GRAPH_GAP, row=replay)


class Oracle:
    """Chooses every operation and every node one by one, by brute force, from all that is submitted."""

    def __init__(self) -> None:
        self.free = {COMPUTE: 0, H2D: 0, D2H: 0}
        self.items: list[list[tuple[object, ...]]] = [[], [], []]
        self.tail = [0, 0, 0]
        self.ready = [0, 0, 0]
        self.marks: list[int | None] = []
        self.nodes: dict[tuple[int, int], tuple[int, int]] = {}

    def pass_markers(self) -> None:
        moved = True
        while moved:
            moved = False
            for q, items in enumerate(self.items):
                if not items or items[0][0] == "op":
                    continue
                kind, mark, launched = items[0]
                if kind == "record":
                    self.marks[mark] = max(self.tail[q], launched)
                elif (time := self.marks[mark]) is not None:
                    self.ready[q] = max(self.ready[q], time)
                    self.tail[q] = max(self.tail[q], time)
                else:
                    continue
                items.pop(0)
                moved = True

    def step(self, horizon: int) -> bool:
        self.pass_markers()
        per_engine: dict[int, tuple[int, tuple[int, int], int]] = {}
        for q, items in enumerate(self.items):
            if items and items[0][0] == "op":
                _, engine, launched, _, row, _ = items[0]
                candidate = (max(self.ready[q], launched), row, q)
                per_engine[engine] = min(per_engine.get(engine, candidate), candidate)
        if not per_engine:
            return False
        start, _, _, q, engine = min(
            (max(self.free[e], r), r, row, q, e) for e, (r, row, q) in per_engine.items()
        )
        if start > horizon:
            return False
        _, engine, _, duration, row, gap = self.items[q].pop(0)
        end = start + duration
        self.free[engine] = self.tail[q] = end
        self.ready[q] = end + gap
        self.nodes[row] = (start, end)
        return True

    def add(self, action: Action, serial: int, now: int) -> None:
        last = len(action.durations) - 1
        for k, duration in enumerate(action.durations):
            compute = action.engine == COMPUTE
            gap = GRAPH_GAP if k < last else GAP if compute else 0
            self.items[action.queue].append(("op", action.engine, now, duration, (serial, k), gap))

    def record(self, queue: int, now: int) -> int:
        self.marks.append(None)
        self.items[queue].append(("record", len(self.marks) - 1, now))
        return len(self.marks) - 1


def consult(actions: list[Action]) -> Outcome:
    oracle, outcome, now, marks = Oracle(), Outcome(), 0, []
    for serial, action in enumerate(actions):
        now += action.delay
        if action.kind in ("op", "graph"):
            oracle.add(action, serial, now)
        elif action.kind == "record":
            marks.append(oracle.record(action.queue, now))
        elif action.kind == "wait" and marks:
            oracle.items[action.queue].append(("wait", marks[-1 - action.event % len(marks)], now))
        elif action.kind == "sync":
            mark = oracle.record(action.queue, now)
            while oracle.step(now):
                pass
            while oracle.marks[mark] is None:
                oracle.step(FOREVER)
                oracle.pass_markers()
            now = max(now, oracle.marks[mark] or 0)
            outcome.host.append(now)
        while oracle.step(now):
            pass
    while oracle.step(FOREVER):
        pass
    outcome.nodes = oracle.nodes
    outcome.marks = [oracle.marks[m] or 0 for m in marks]
    return outcome


# Multiples of 5 make ties, where the rules matter.
durations = st.sampled_from([0, 5, 5, 10, 20, 60])
actions = st.builds(
    Action,
    kind=st.sampled_from(["op", "op", "graph", "record", "wait", "wait", "settle", "sync"]),
    queue=st.integers(0, 2),
    delay=st.sampled_from([0, 0, 5, 5, 10, 25]),
    event=st.integers(0, 3),
    durations=st.lists(durations, min_size=1, max_size=6).map(tuple),
)


def normal(action: Action, engine: int) -> Action:
    """Only ops run on other engines than compute, and only graphs have several nodes."""
    if action.kind == "op":
        action.engine, action.durations = engine, action.durations[:1]
    return action


programs = st.lists(st.builds(normal, actions, st.sampled_from([COMPUTE, COMPUTE, H2D, D2H])), max_size=40)


OLDER_KERNEL_BEHIND_A_COPY_WITHOUT_DURATION = [
    *(Action("op", 0, 0) for _ in range(3)),
    Action("graph", 2, 0, durations=(0, 0, 0, 0, 5)),
    Action("op", 2, 0, engine=H2D),
    Action("op", 2, 0),
    Action("graph", 0, 0, durations=(0, 5)),
]


@settings(max_examples=500)
@example(OLDER_KERNEL_BEHIND_A_COPY_WITHOUT_DURATION)
@given(programs)
def test_times_equal_the_oracles(program: list[Action]) -> None:
    expected = consult(program)
    actual = simulate(program, node_trace=True, settles=True)
    assert actual.nodes == expected.nodes
    assert actual.marks == expected.marks
    assert actual.host == expected.host


@settings(max_examples=100)
@given(programs)
def test_settling_early_or_late_changes_nothing(program: list[Action]) -> None:
    early = simulate(program, node_trace=False, settles=True)
    late = simulate(program, node_trace=False, settles=False)
    assert (early.spans, early.marks, early.host) == (late.spans, late.marks, late.host)


@settings(max_examples=100)
@given(programs)
def test_the_span_of_a_graph_covers_its_nodes(program: list[Action]) -> None:
    whole = simulate(program, node_trace=False, settles=True)
    nodes = simulate(program, node_trace=True, settles=True)
    assert whole.spans == nodes.spans


def test_a_held_queue_does_not_hold_its_engine() -> None:
    simulation = Simulation(gap=0)
    slow, held, free = simulation.queue(), simulation.queue(), simulation.queue()
    simulation.submit(slow, H2D, now=0, duration=100, row=("copy",))
    simulation.wait_event(held, simulation.record(slow, 1))
    simulation.submit(held, COMPUTE, now=2, duration=10, row=("held",))
    simulation.submit(free, COMPUTE, now=3, duration=10, row=("free",))
    simulation.drain()
    assert {row[0]: start for row, start, _ in simulation.served} == {"copy": 0, "free": 3, "held": 100}
    assert [(h.queue, h.start, h.end) for h in simulation.waits] == [(1, 2, 100)]


def test_an_operation_enqueued_after_the_event_is_not_held() -> None:
    simulation = Simulation(gap=0)
    other, queue = simulation.queue(), simulation.queue()
    simulation.submit(other, COMPUTE, now=0, duration=50, row=("first",))
    simulation.wait_event(queue, simulation.record(other, 1))
    simulation.submit(queue, COMPUTE, now=80, duration=10, row=("second",))
    simulation.drain()
    assert not simulation.waits


def test_pending_operations_stay_bounded_while_the_device_keeps_up() -> None:
    simulation = Simulation(gap=0)
    queues = [simulation.queue(), simulation.queue()]
    for k in range(5000):
        simulation.submit(queues[k % 2], COMPUTE, now=12 * k, duration=11 + k % 3, row=(k,))
    assert simulation.pending < 1000


def test_settling_serves_started_operations_before_older_waiting_ones() -> None:
    simulation = Simulation(gap=0)
    first, second, third = (simulation.queue() for _ in range(3))
    simulation.submit(first, COMPUTE, now=0, duration=100, row=("busy",))
    simulation.submit(second, COMPUTE, now=1, duration=10, row=("waits",))
    simulation.wait_event(third, simulation.record(third, 2))
    simulation.submit(third, H2D, now=2, duration=10, row=("starts",))
    simulation.run(50)
    assert [row for row, _, _ in simulation.served] == [("busy",), ("starts",)]
