"""The picture of a hand-drawn timeline: its steps, lanes and waits, and two pictures side by side."""

from __future__ import annotations

import pytest

from schedbench.cli.strip import strips
from schedbench.profiles.picture.draw import picture, pictures, representative
from schedbench.profiles.picture.model import Arrow, Boundary
from schedbench.profiles.record.recording import RecordedTimeline
from schedbench.profiles.record.timeline import Site
from schedbench.sched.observe import StepInfo
from tests.profiles.measure.conftest import FORWARD, SCHEDULE, Drawing

STREAMS = {SCHEDULE: "schedule", FORWARD: "forward"}
SITES = (Site("sched/a.py", "f", 7, "x.tolist()"),)


def timeline(drawing: Drawing) -> RecordedTimeline:
    return RecordedTimeline(drawing.windows(), SITES, STREAMS)


@pytest.fixture
def two_decodes() -> RecordedTimeline:
    """Forwards in [10, 20) and [40, 50). The host waits in [12, 22) for the end of the first, which also held an op of
    the schedule stream, and enqueues the second at 38; the scene begins with the range of step 0, at 4."""
    drawing = Drawing()
    drawing.range(4, 9, step=0)
    drawing.forward(10, 20, step=0, launched=9)
    drawing.range(10, 38, step=1)
    drawing.wait(12, 20, step=1, stream=SCHEDULE)
    drawing.call(12, 22, step=1, waited=9, stream=FORWARD, site=0)
    drawing.op(20, 23, step=1, kind="h2d", name="upload", bytes=8, site=0)
    drawing.forward(40, 50, step=1, launched=38)
    for step, settled in ((0, 45), (1, 60)):
        drawing.step(step, launched=settled - 5, settled=settled, steady=True)
    return timeline(drawing)


def test_lanes_hold_all_work_from_the_first_host_range_to_the_last_forward(two_decodes):
    (scene,) = picture({"the run": two_decodes})
    assert (scene.title, scene.end) == ("decode (steady), steps 0 to 1", 46_000)
    found = {
        lane.label: [(piece.kind, piece.name, piece.start, piece.end) for piece in lane.slices]
        for lane in scene.lanes
    }
    assert found == {
        "host": [
            ("phase", "prepare", 0, 5_000),
            ("phase", "prepare", 6_000, 34_000),
            ("stall", "synchronize", 9_000, 18_000),
        ],
        "schedule": [("held", "waits for an event", 8_000, 16_000), ("copy", "upload", 16_000, 19_000)],
        "forward": [("kernel", "k", 6_000, 16_000), ("kernel", "k", 36_000, 46_000)],
        "GPU idle": [
            ("exposed_stall", "exposed stall", 16_000, 18_000),
            ("exposed_host", "exposed host work", 18_000, 34_000),
            ("launch_latency", "launch latency", 34_000, 36_000),
        ],
    }
    assert scene.boundaries == (Boundary("", 6_000, 0), Boundary("", 36_000, 1))


def test_an_arrow_leads_from_an_end_to_the_wait_for_it(two_decodes):
    (scene,) = picture({"": two_decodes})
    assert scene.arrows == (
        Arrow("forward", 16_000, "host", 18_000, 9_000, "k", "sched/a.py:7", "x.tolist()"),
        Arrow("forward", 16_000, "schedule", 16_000, 8_000, "k"),
    )


def test_a_wait_for_another_rank_leads_from_no_lane():
    drawing = Drawing()
    drawing.forward(10, 20, step=0, launched=9)
    drawing.call(12, 25, step=0, waited=9, stream=FORWARD, site=0, kind="link", name="receive output")
    drawing.forward(30, 40, step=0, launched=28)
    drawing.step(0, launched=9, settled=45)
    scenes = picture({"": timeline(drawing)})
    waited = Arrow("", 6_000, "host", 15_000, 9_000, "receive output", "sched/a.py:7", "x.tolist()")
    assert [scene.arrows for scene in scenes] == [(waited,)]
    assert "host waited 9.00 µs to receive output" in [line.plain for line in strips(scenes, 80)]


def test_short_neighbours_are_drawn_as_one():
    drawing = Drawing()
    for at in range(100):
        drawing.forward(at / 100, (at + 1) / 100, step=0)
    drawing.forward(1, 3000, step=0)
    drawing.step(0, launched=1, settled=3000)
    (scene,) = picture({"": timeline(drawing)})
    (lane,) = scene.lanes
    assert [(piece.name, piece.start, piece.end) for piece in lane.slices] == [
        ("k and 99 more", 0, 1_000),
        ("k", 1_000, 3_000_000),
    ]


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ("P D d d d d d P d d", [[3, 4, 5], [7]]),
        ("M D D D", [[1, 2, 3], [0]]),
        ("V V V V", [[1, 2, 3]]),
        ("P P P", [[1]]),
        ("", []),
    ],
)
def test_representative_steps_are_consecutive_and_from_the_middle(kinds, chosen):
    names = {"p": "prefill", "d": "decode", "m": "mixed", "v": "verify"}
    steps = [
        StepInfo(step, names[sign.lower()], 1, 1, sign.islower()) for step, sign in enumerate(kinds.split())
    ]
    assert [[info.step for info in found] for found in representative(steps)] == chosen


def test_ranks_are_drawn_below_each_other_in_the_time_of_the_first(two_decodes):
    (scene,) = picture({"decode 0": two_decodes, "decode 1": two_decodes})
    assert [lane.label for lane in scene.lanes][::4] == ["decode 0 host", "decode 1 host"]
    assert {arrow.source for arrow in scene.arrows} == {"decode 0 forward", "decode 1 forward"}


def test_two_pictures_are_aligned_at_their_first_forward(two_decodes):
    drawing = Drawing()
    drawing.range(0, 9, step=0)
    drawing.forward(100, 110, step=0, launched=9)
    drawing.step(0, launched=10, settled=120, steady=True)
    (scene,) = pictures({"A": {"": two_decodes}, "B": {"": timeline(drawing)}})
    first = {group: min(b.at for b in scene.boundaries if b.group == group) for group in ("A", "B")}
    assert first == {"A": 100_000, "B": 100_000}
    assert [lane.label for lane in scene.lanes] == [
        *("A host", "A schedule", "A forward", "A GPU idle"),
        *("B host", "B forward"),
    ]
    assert scene.end == 140_000
    assert {arrow.target for arrow in scene.arrows} == {"A host", "A schedule"}
