"""The critical path of hand-drawn timelines with known answers, and of runs, whose time it covers exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.profiles.measure.critical_path import CriticalPathSink
from schedbench.profiles.measure.waiting import WaitingSink
from schedbench.profiles.record.result import IdlePart, Result
from tests.acceptance.runs import executed, resolved

COPY = 2


def path_of(drawing: Any, cuts: Sequence[int] = (), *, sync_return: int = 0) -> tuple[CriticalPathSink, int]:
    """Returns the path, and the forward window in ns."""
    waiting, path = WaitingSink(), CriticalPathSink(sync_return)
    for window in drawing.windows(cuts):
        waiting.feed(window)
        path.feed(window, waiting.take_periods())
    window = waiting.finish().window
    path.finish(waiting.take_periods())
    return path, window


def us(path: CriticalPathSink, kind: str = "decode") -> dict[str, float]:
    return {part: ns / 1000 for part, ns in path.parts[kind].items() if ns}


def steps(drawing: Any, count: int) -> None:
    for step in range(count):
        drawing.step(step, launched=step, settled=100 + step)


def test_forwards_back_to_back_are_bounded_by_kernels(drawing: Any) -> None:
    drawing.forward(0, 10, step=0)
    drawing.forward(10, 30, step=1, launched=5)
    drawing.range(1, 4, step=1)
    steps(drawing, 2)
    path, window = path_of(drawing)
    assert us(path) == {"kernels": 30.0} and window == 30_000


def test_a_forward_within_that_of_another_step_takes_no_time_of_its_own(drawing: Any) -> None:
    drawing.forward(0, 30, step=0)
    drawing.forward(10, 20, step=1, launched=5, stream=COPY)
    drawing.forward(30, 40, step=2, launched=5, stream=COPY)
    for step, kind in enumerate(("prefill", "decode", "decode")):
        drawing.step(step, launched=step, settled=100 + step, kind=kind)
    path, window = path_of(drawing)
    assert path.steps == {"prefill": 1, "decode": 2}
    assert (us(path, "prefill"), us(path), window) == ({"kernels": 30.0}, {"kernels": 10.0}, 40_000)


def test_a_late_host_also_bounds_the_time_of_forwards(drawing: Any) -> None:
    """The second forward waits for its launch at 30; the host began to prepare it at 2, while the first one ran."""
    drawing.forward(0, 10, step=0)
    drawing.range(2, 28, step=1, name="prepare")
    drawing.call(28, 30, step=1, kind="launch")
    drawing.forward(30, 40, step=1, launched=30)
    steps(drawing, 2)
    path, _ = path_of(drawing)
    assert us(path) == {"host in no range": 2.0, "host prepare": 26.0, "launches": 2.0, "kernels": 10.0}


def test_the_path_follows_a_wait_to_its_cause(drawing: Any) -> None:
    """The host waits for a copy after the first forward and returns 1 us later; then it launches."""
    drawing.forward(0, 10, step=0)
    drawing.op(10, 12, step=0, stream=COPY, kind="d2h", launched=1)
    drawing.call(2, 13, step=0, waited=10, stream=COPY)
    drawing.range(13, 15, step=1, name="settle")
    drawing.forward(15, 20, step=1, launched=15)
    steps(drawing, 2)
    path, _ = path_of(drawing, sync_return=1000)
    assert us(path) == {"kernels": 15.0, "copies": 2.0, "waits": 1.0, "host settle": 2.0}


def test_gaps_of_a_stream_and_waits_for_events_of_other_devices(drawing: Any) -> None:
    drawing.forward(0, 10, step=0)
    drawing.forward(11, 20, step=1, launched=1)
    drawing.forward(25, 30, step=2, launched=2)
    drawing.wait(20, 25, step=2)
    steps(drawing, 3)
    path, _ = path_of(drawing)
    assert us(path) == {"kernels": 24.0, "gaps": 1.0, "waits": 5.0}


@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 6000), max_size=40))
@settings(max_examples=30)
def test_the_path_covers_every_instant_for_any_windows(play: Any, seed: int, cuts: list[int]) -> None:
    """The records of 200 steps are followed in several chunks."""
    path, window = path_of(play(Random(seed), 200), cuts)
    assert sum(parts.total() for parts in path.parts.values()) == window
    assert path.steps.total() > 150


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    few = ("workload.requests=4", "device.values=none")
    real = ("device.values=real",)
    more = {
        "mixed": (), "mixed_serial": ("engine.overlap=false",), "spec_v2": real, "retraction": real,
        "cases/h2d-blocking-output-ids": ("engine.relay=pr25945", "workload.requests=1"),
    }  # fmt: skip
    found = {}
    for name, overrides in more.items():
        found[name] = executed(resolved(name.removesuffix("_serial"), *few, *overrides))
    return found


@pytest.mark.wide
def test_parts_sum_to_the_step_and_steps_to_the_window(
    results: dict[str, Result],
) -> None:
    for name, result in results.items():
        whole = sum(path.total_ns for path in result.critical_path.values())
        for path in result.critical_path.values():
            assert sum(path.parts_ns.values()) == path.total_ns, name
        assert isinstance(result.idle, IdlePart)
        idle = result.idle
        parts = (idle.host_late_us, idle.dependency_us, idle.kernel_gap_us, idle.no_work_us, idle.residue_us)
        [occupied] = result.metrics["forward_occupancy"].values
        assert whole * (1 - occupied) == pytest.approx(1e3 * sum(parts), rel=1e-6, abs=1), name


def test_the_slower_side_bounds_a_decode(results: dict[str, Result]) -> None:
    """In a tiny model all forwards overlap host work, so the host bounds; in an 8B shape the kernels do, with the
    blocking upload and the work after it."""

    def shares(name: str) -> Counter[str]:
        path = results[name].critical_path["decode"]
        return Counter({part: ns / path.total_ns for part, ns in path.parts_ns.items()})

    tiny, large = shares("mixed"), shares("cases/h2d-blocking-output-ids")
    assert tiny["kernels"] < 0.01 and tiny["host prepare"] > 0.1
    assert 0.9 < large["kernels"] < 0.99
    assert large["copies"] > 0 and large["waits"] > 0 and large["host prepare"] > 0
