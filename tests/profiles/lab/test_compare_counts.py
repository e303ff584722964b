"""Two result documents, compared line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedbench.profiles.lab import single_run
from schedbench.profiles.lab.compare_counts import compare_counts
from schedbench.profiles.lab.compare_counts import main as compare
from schedbench.profiles.record.result import CopyRow, CountSummary, KindCounts, Result, SitePart, SyncRow

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


def counts(steps, **streams):
    tallies = {
        stream: {
            name: CountSummary(median=n, mean=n, max=n, steps_with=steps) for name, n in counters.items()
        }
        for stream, counters in streams.items()
    }
    return KindCounts.model_validate({"steps": steps, **tallies})


@pytest.fixture
def result():
    sample = Result.from_json(SAMPLE.read_text())

    def make(*, copies=(), syncs=(), per_step=None):
        update = {
            "copies": tuple(copies),
            "syncs": tuple(syncs),
            "per_step": per_step or {"decode": counts(3)},
        }
        return sample.model_copy(update=update)

    return make


def test_a_run_equals_itself(result):
    run = result(
        copies=[copy()], syncs=[sync()], per_step={"decode": counts(3, schedule={"h2d": 2, "kernel": 9})}
    )
    comparison = compare_counts(run, run)
    assert comparison.equal
    assert comparison.compared == 2


def test_lines_may_move(result):
    assert compare_counts(result(copies=[copy()]), result(copies=[copy(site=site(line=99))])).equal


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
def test_every_other_property_tells_lines_apart(result, change):
    comparison = compare_counts(result(copies=[copy()]), result(copies=[copy(**change)]))
    assert sorted((d.a, d.b) for d in comparison.lines) == [(0, 6), (6, 0)]


def test_a_count_that_differs(result):
    (difference,) = compare_counts(result(syncs=[sync()]), result(syncs=[sync(count=4)])).lines
    assert (difference.line.what, difference.a, difference.b) == ("cudaEventSynchronize", 3, 4)


def test_with_unlike_steps_lines_are_compared_per_step(result):
    a = result(copies=[copy(count=6)], per_step={"decode": counts(3)})
    same = result(copies=[copy(count=10)], per_step={"decode": counts(5)})
    more = result(copies=[copy(count=11)], per_step={"decode": counts(5)})
    assert compare_counts(a, same).lines == ()
    assert compare_counts(a, same).steps == {"decode": (3, 5)}
    assert [(d.a, d.b) for d in compare_counts(a, more).lines] == [(2.0, 2.2)]


def test_kernels_and_copies_within_a_forward_are_not_compared(result):
    a = result(
        copies=[copy(direction="d2d", host_memory="", blocking=False, range="model", stream="forward")],
        per_step={"decode": counts(3, forward={"kernel": 400, "d2d": 2})},
    )
    b = result(per_step={"decode": counts(3, forward={"kernel": 7, "d2d": 0})})
    assert compare_counts(a, b).equal


def test_copies_within_the_device_outside_a_forward_are(result):
    moved = copy(direction="d2d", host_memory="", blocking=False)
    assert not compare_counts(result(copies=[moved]), result()).equal


def test_calls_that_only_waited_and_what_belongs_to_no_step_are_left_out(result):
    a = result(copies=[copy(kind="none")], syncs=[sync(sync=False), sync(kind="none")])
    assert compare_counts(a, result()).compared == 0


def test_counts_per_step_that_differ(result):
    a = result(per_step={"decode": counts(3, schedule={"h2d": 1, "sync": 0})})
    b = result(per_step={"decode": counts(3, schedule={"h2d": 2})})
    (difference,) = compare_counts(a, b).per_step
    assert difference == ("decode", "schedule", "h2d", (1.0, 1), (2.0, 2))


def test_the_document_is_plain(result):
    document = compare_counts(result(copies=[copy()]), result()).document()
    assert document["equal"] is False
    assert document["lines"][0]["statement"] == "x = y.to(device)"
    assert document["lines"][0]["a"] == 6


def test_from_two_processes_files_to_a_third(tmp_path):
    files = [str(tmp_path / name) for name in ("a.json", "b.json", "comparison.json")]
    small = ["--set", "workload.requests=2", "--set", "workload.output_tokens.max=6"]
    for output in files[:2]:
        assert single_run.main(["mixed", "--device", "vgpu", *small, "--output", output]) == 0
    assert compare(files) == 0
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert document["equal"]
    assert document["compared"] > 10
