"""A phase's own time, from synthetic ranges and calls."""

from __future__ import annotations

from schedbench.profiles.calibrate.fit import TimedSample
from schedbench.profiles.calibrate.host import PhaseCollector, own_times
from schedbench.profiles.record.timeline import Call, Range
from schedbench.sched.observe import LogicalClock, StepKind


def span(name: str, start: int, end: int, size: int = 4, step: int = 1) -> Range:
    return Range(name, step, size, start, end)


def call(kind: str, within: str, start: int, end: int) -> Call:
    return Call(kind, kind, start, end, 0, 0, within, 1, -1)  # type: ignore[arg-type]


def phase_times(
    ranges: list[Range], calls: list[Call], through_torch: float = 0
) -> dict[str, list[TimedSample]]:
    phases = ("prepare", "settle", "resolve")
    found, _ = own_times(ranges, calls, phases=phases, through_torch=through_torch)
    return {name: samples for (name, _), samples in found.items()}


def test_a_single_range_is_its_own_time() -> None:
    assert phase_times([span("settle", 100, 400)], []) == {"settle": [TimedSample(4, 300)]}


def test_a_phase_inside_another_counts_once() -> None:
    ranges = [span("resolve", 150, 250, 2), span("prepare", 100, 400, 8)]  # the inner one ends first
    assert phase_times(ranges, []) == {"prepare": [TimedSample(8, 200)], "resolve": [TimedSample(2, 100)]}


def test_a_range_of_no_phase_counts_for_the_enclosing_phase() -> None:
    ranges = [span("resolve", 180, 200), span("conclude", 150, 250), span("settle", 100, 400)]
    assert phase_times(ranges, []) == {"settle": [TimedSample(4, 280)], "resolve": [TimedSample(4, 20)]}


def test_time_outside_of_every_phase_is_separate() -> None:
    ranges = [span("resolve", 20, 50), span("barrier", 0, 100), span("settle", 200, 300)]
    calls = [call("event", "barrier", 60, 65)]
    found, outside = own_times(ranges, calls, phases=("resolve", "settle"), through_torch=0)
    assert outside == 65
    assert {name: sum(s.ns for s in group) for (name, _), group in found.items()} == {
        "resolve": 30,
        "settle": 100,
    }


def test_device_calls_and_torchs_cost_of_them_are_excluded() -> None:
    ranges = [span("conclude", 150, 250), span("settle", 100, 400)]
    calls = [
        call("sync", "settle", 300, 340),
        call("launch", "settle", 110, 110),
        call("copy", "conclude", 200, 210),
        call("event", "conclude", 215, 215),
    ]
    assert phase_times(ranges, calls, through_torch=7) == {"settle": [TimedSample(4, 300 - 40 - 10 - 2 * 7)]}


def test_calls_belong_to_the_right_range_of_a_name() -> None:
    ranges = [span("settle", 0, 100, 1), span("settle", 200, 300, 2), span("settle", 400, 500, 3)]
    calls = [call("sync", "settle", 210, 240), call("sync", "settle", 480, 500)]
    assert phase_times(ranges, calls)["settle"] == [
        TimedSample(1, 100),
        TimedSample(2, 70),
        TimedSample(3, 80),
    ]


def test_adjacent_ranges_are_not_nested() -> None:
    ranges = [span("prepare", 0, 100), span("resolve", 100, 100), span("settle", 100, 150)]
    assert phase_times(ranges, [])["prepare"] == [TimedSample(4, 100)]
    assert phase_times(ranges, [])["settle"] == [TimedSample(4, 50)]


def test_no_phase_time_is_negative() -> None:
    found = phase_times([span("settle", 0, 10)], [call("launch", "settle", 5, 5)], through_torch=50)
    assert found == {"settle": [TimedSample(4, 0)]}


def test_a_range_has_the_kind_that_was_planned_at_its_start() -> None:
    """A prefill may become mixed, and an abandoned decode passes its number to a prefill."""
    collector, clock = PhaseCollector(), LogicalClock()
    plans: list[tuple[int, int, StepKind]] = [
        (0, 1, "prefill"), (15, 1, "mixed"), (100, 2, "decode"), (110, 2, "prefill"),
    ]  # fmt: skip
    with collector.watch(clock, 1) as listener:
        for at, step, kind in plans:
            clock.sleep_until(at)
            listener.planned(step, kind)
    ranges = [
        *(
            span("prepare", 0, 10, 2, step=1),
            span("prepare", 20, 50, 7, step=1),
            span("settle", 60, 70, 9, step=1),
        ),
        *(
            span("prepare", 100, 104, step=2),
            span("prepare", 110, 115, step=2),
            span("prepare", 200, 205, step=3),
        ),
    ]
    phases = ("prepare", "settle")
    found, _ = own_times(ranges, [], phases=phases, through_torch=0, kind_of=collector.kind_of)
    assert {key: samples for key, samples in found.items() if key[1] is not None} == {
        ("prepare", "prefill"): [TimedSample(2, 10), TimedSample(4, 5)],
        ("prepare", "mixed"): [TimedSample(7, 30)],
        ("settle", "mixed"): [TimedSample(9, 10)],
        ("prepare", "decode"): [TimedSample(4, 4)],
    }
    assert len(found["prepare", None]) == 5
