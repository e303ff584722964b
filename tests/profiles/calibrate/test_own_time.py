"""What a phase itself took, of made-up ranges and calls."""

from __future__ import annotations

from schedbench.profiles.calibrate.fit import TimedSample
from schedbench.profiles.calibrate.own_time import PhaseCollector, own_times
from schedbench.profiles.record.timeline import Call, Range
from schedbench.sched.observe import LogicalClock, StepKind


def span(name: str, start: int, end: int, size: int = 4, step: int = 1) -> Range:
    return Range(name, step, size, start, end)


def call(kind: str, within: str, start: int, end: int) -> Call:
    return Call(kind, kind, start, end, 0, 0, within, 1, -1)  # type: ignore[arg-type]


def told(ranges: list[Range], calls: list[Call], through_torch: float = 0) -> dict[str, list[TimedSample]]:
    phases = ("prepare", "settle", "resolve")
    return own_times(ranges, calls, phases=phases, through_torch=through_torch).phases


def test_a_range_alone_is_its_own() -> None:
    assert told([span("settle", 100, 400)], []) == {"settle": [TimedSample(4, 300)]}


def test_a_phase_inside_another_counts_once() -> None:
    ranges = [span("resolve", 150, 250, 2), span("prepare", 100, 400, 8)]  # they end inside out
    assert told(ranges, []) == {"prepare": [TimedSample(8, 200)], "resolve": [TimedSample(2, 100)]}


def test_a_range_of_no_phase_belongs_to_the_one_around_it() -> None:
    ranges = [span("resolve", 180, 200), span("conclude", 150, 250), span("settle", 100, 400)]
    assert told(ranges, []) == {"settle": [TimedSample(4, 280)], "resolve": [TimedSample(4, 20)]}


def test_outside_of_every_phase_time_is_told_apart() -> None:
    ranges = [span("resolve", 20, 50), span("barrier", 0, 100), span("settle", 200, 300)]
    calls = [call("event", "barrier", 60, 65)]
    found = own_times(ranges, calls, phases=("resolve", "settle"), through_torch=0)
    assert found.outside == 65
    assert {name: sum(s.ns for s in group) for name, group in found.phases.items()} == {
        "resolve": 30,
        "settle": 100,
    }


def test_device_calls_are_nobodys_and_torchs_way_to_them_neither() -> None:
    ranges = [span("conclude", 150, 250), span("settle", 100, 400)]
    calls = [
        call("sync", "settle", 300, 340),
        call("launch", "settle", 110, 110),
        call("copy", "conclude", 200, 210),
        call("event", "conclude", 215, 215),
    ]
    assert told(ranges, calls, through_torch=7) == {"settle": [TimedSample(4, 300 - 40 - 10 - 2 * 7)]}


def test_calls_find_the_right_range_of_a_name() -> None:
    ranges = [span("settle", 0, 100, 1), span("settle", 200, 300, 2), span("settle", 400, 500, 3)]
    calls = [call("sync", "settle", 210, 240), call("sync", "settle", 480, 500)]
    assert told(ranges, calls)["settle"] == [TimedSample(1, 100), TimedSample(2, 70), TimedSample(3, 80)]


def test_ranges_that_touch_are_not_inside_each_other() -> None:
    ranges = [span("prepare", 0, 100), span("resolve", 100, 100), span("settle", 100, 150)]
    assert told(ranges, [])["prepare"] == [TimedSample(4, 100)]
    assert told(ranges, [])["settle"] == [TimedSample(4, 50)]


def test_no_phase_takes_less_than_nothing() -> None:
    found = told([span("settle", 0, 10)], [call("launch", "settle", 5, 5)], through_torch=50)
    assert found == {"settle": [TimedSample(4, 0)]}


def test_steps_of_a_kind_are_told_apart_by_what_was_known() -> None:
    """A prefill may become mixed, and a decode that came to nothing leaves its number to a prefill."""
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
    found = own_times(ranges, [], phases=phases, through_torch=0, kind_of=collector.kind_of)
    assert found.kinds == {
        ("prepare", "prefill"): [TimedSample(2, 10), TimedSample(4, 5)],
        ("prepare", "mixed"): [TimedSample(7, 30)],
        ("settle", "mixed"): [TimedSample(9, 10)],
        ("prepare", "decode"): [TimedSample(4, 4)],
    }
    assert len(found.phases["prepare"]) == 5
