"""Maps of ranges: the shipped ones, and the errors of a user's map."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from schedbench.profiles.captures import maps
from schedbench.profiles.captures.capture import CapturedRange, ProfilerCapture
from schedbench.profiles.captures.files import chosen
from schedbench.profiles.captures.maps import FILES, MapError, RangeMap
from schedbench.profiles.captures.steps import CapturedSteps
from schedbench.profiles.cuda.nvtx_ranges import DOMAIN
from schedbench.sched.observe import RANGES

OTHER = """
name: other
about: an engine whose loop has a range per step, with its kind in the payload
steps: {launch: 'step', number: order}
ranges:
  - {match: 'plan.*', name: plan, category: schedule, of: next}
  - {match: step, name: step, category: forward}
  - {match: wait, name: wait, category: idle}
kinds:
  - {match: step, kind: prefill, payload: [1]}
  - {match: step, kind: decode, payload: [2, 3]}
streams: {forward: 21}
"""


@pytest.mark.parametrize("name", maps.names())
def test_shipped_maps_are_valid(name):
    assert maps.load(name).name == name


def test_our_own_map_has_all_of_our_ranges():
    ours = maps.load("schedbench")
    assert ours.domain == DOMAIN
    assert {rule.match: rule.category for rule in ours.ranges if rule.match != "sleep"} == RANGES


def test_a_map_of_the_user_is_applied(tmp_path):
    file = tmp_path / "other.yaml"
    file.write_text(OTHER)
    meaning = maps.load(str(file))
    spans = [
        CapturedRange("plan a", 0, 5, 1),
        CapturedRange("step", 10, 20, 1, payload=1),
        CapturedRange("plan b", 21, 22, 1),
        CapturedRange("wait", 23, 29, 1),
        CapturedRange("step", 30, 40, 1, payload=3),
        CapturedRange("step", 50, 60, 1, payload=9),
    ]
    steps = CapturedSteps(spans, meaning, epoch=0)
    assert [info.kind for info in steps.log.launched] == ["prefill", "decode", "step"]
    found = [(span.name, span.step) for span in steps.log.ranges]
    assert found == [("plan", 0), ("step", 0), ("plan", 1), ("sleep", -1), ("step", 1), ("step", 2)]
    assert meaning.streams.forward == 21


def test_a_map_assigns_results_of_steps_before_the_capture():
    """Launch and result alternate, so only the map can state that a result belongs to the launch before the last."""
    document = OTHER.replace("number: order", "settle: result, settles: previous").replace("wait", "result")
    spans = [
        CapturedRange("step", 0, 10, 1),
        CapturedRange("result", 11, 20, 1),
        CapturedRange("step", 30, 40, 1),
        CapturedRange("result", 41, 50, 1),
    ]
    overlapped = CapturedSteps(spans, FILES.parse(document.encode(), "m"), epoch=0)
    assert (overlapped.unseen, [info.step for info in overlapped.log.settled]) == (1, [0])
    serial = CapturedSteps(spans, FILES.parse(document.replace("previous", "oldest").encode(), "m"), epoch=0)
    assert (serial.unseen, [info.step for info in serial.log.settled]) == (0, [0, 1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (OTHER.replace("number: order", "number: sideways"), "m:4: steps.number: Input should be 'order' or"),
        (OTHER.replace("'plan.*'", "'plan(['"), "m:6: ranges.0.match: not a regular expression"),
        (OTHER + "colour: red\n", "m:13: colour: unknown key"),
        (OTHER + "name: twice\n", "m:13: name: duplicate key"),
        ("[1]", "m:1: expected a mapping, got a list"),
        ("{", "m:1: not YAML"),
        ("", "m:1: "),
    ],
)
def test_an_invalid_map_is_refused_with_its_line(content, message):
    with pytest.raises(MapError, match=message):
        FILES.parse(content.encode(), "m")


def test_all_errors_of_a_map_are_reported_at_once():
    with pytest.raises(MapError) as refused:
        FILES.parse(
            OTHER.replace("number: order", "number: x").replace("category: idle", "category: y").encode(), "m"
        )
    assert len(str(refused.value).splitlines()) == 2


def test_an_unknown_map_is_refused_with_the_known_names():
    with pytest.raises(MapError, match="did you mean 'sglang'"):
        maps.load("sglan")
    with pytest.raises(MapError, match="available: schedbench, sglang"):
        maps.load("zzz")


def test_maps_differ_by_the_hash_of_their_content():
    meaning = FILES.parse(OTHER.encode(), "m")
    assert isinstance(meaning, RangeMap)
    assert meaning.sha256 != FILES.parse(OTHER.replace("21", "22").encode(), "m").sha256


def test_the_map_that_finds_the_most_steps_is_chosen():
    """A capture of another engine may have a few ranges with names like ours."""

    def capture(ours: int, theirs: int) -> ProfilerCapture:
        names = ["decode bs=4"] * ours + ["scheduler.run_batch"] * theirs
        spans = [CapturedRange(name, at, at + 1, thread=1) for at, name in enumerate(names)]
        return cast(ProfilerCapture, SimpleNamespace(spans=spans))

    found = [chosen(capture(*counts)).name for counts in ((2, 30), (30, 2), (0, 3), (0, 0))]
    assert found == ["sglang", "schedbench", "sglang", "schedbench"]
