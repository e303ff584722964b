"""The counts of a run by source line."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedbench.profiles.lab.single_run import counted_lines
from schedbench.profiles.record.result import CopyRow, Result, SitePart, SyncRow

SAMPLE = Path(__file__).parents[1] / "sample_result.json"


def site(statement="x = y.to(device)", line=10):
    return SitePart(file="sched/loop/prepare.py", function="prepare", line=line, statement=statement)


def copy(**more):
    fields = {
        "site": site(), "range": "prepare", "kind": "decode", "stream": "schedule", "direction": "h2d",
        "host_memory": "pageable", "blocking": True, "count": 6, "steady": 4, "bytes": 48, "host_us": 1.0,
        "exposed_us": 0.0,
    }  # fmt: skip
    return CopyRow(**(fields | more))


def sync(**more):
    fields = {
        "site": site("done.synchronize()"), "range": "settle", "kind": "decode", "stream": "forward",
        "call": "cudaEventSynchronize", "sync": True, "count": 3, "steady": 3, "host_us": 1.0, "exposed_us": 0.0,
    }  # fmt: skip
    return SyncRow(**(fields | more))


@pytest.fixture
def lines():
    sample = Result.from_json(SAMPLE.read_text())

    def counted(*, copies=(), syncs=()):
        return counted_lines(sample.model_copy(update={"copies": tuple(copies), "syncs": tuple(syncs)}))

    return counted


def test_line_numbers_may_differ(lines):
    assert lines(copies=[copy()]) == lines(copies=[copy(site=site(line=99))])


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "mixed"},
        {"stream": "forward"},
        {"range": "admit"},
        {"direction": "d2h"},
        {"host_memory": "pinned"},
        {"blocking": False},
        {"site": None},
        {"site": site("another()")},
    ],
)
def test_lines_differ_by_every_other_property(lines, change):
    assert not {*lines(copies=[copy()])} & {*lines(copies=[copy(**change)])}


def test_counts_of_one_line_are_added(lines):
    ((line, counted),) = lines(copies=[copy(), copy(count=1, bytes=8)]).items()
    assert (line.what, counted) == ("h2d pageable blocking", {"count": 7, "bytes": 56})


def test_copies_within_the_device_count_outside_of_forwards(lines):
    within = {"direction": "d2d", "host_memory": "", "blocking": False}
    assert not lines(copies=[copy(range="model", stream="forward", **within)])
    assert [line.what for line in lines(copies=[copy(**within)])] == ["d2d"]


def test_pure_waits_and_records_of_no_step_are_left_out(lines):
    assert not lines(copies=[copy(kind="none")], syncs=[sync(sync=False), sync(kind="none")])
    assert [line.what for line in lines(syncs=[sync()])] == ["cudaEventSynchronize"]
