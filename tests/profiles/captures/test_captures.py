"""Captures made elsewhere: the same loop gives the same result from every version of export and from torch's trace."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from schedbench.profiles.captures import maps
from schedbench.profiles.captures.capture import CaptureFileError
from schedbench.profiles.captures.files import Reader
from schedbench.profiles.record.result import Abstained, Result
from tests.acceptance.runs import value
from tests.profiles.captures.exports import VERSIONS, Export, Version, looped, own_loop, sglang_loop
from tests.profiles.cuda.conftest import Trace


def counts(result: Result) -> dict[tuple[str, str, str], tuple[float, int]]:
    return {
        (kind, stream, counter): (tally.mean, tally.max)
        for kind, found in result.per_step.items()
        for stream, counters in found.streams.items()
        for counter, tally in counters.items()
    }


def notes(result: Result) -> list[str]:
    capture = result.environment["capture"]
    assert isinstance(capture, dict)
    found = capture["notes"]
    assert isinstance(found, list)
    return [str(note) for note in found]


def drawn(source: Version | str) -> Export | Trace:
    drawer = Trace() if source == "torch" else Export(source)  # type: ignore[arg-type]
    sglang_loop(drawer, model=True)
    return drawer


@pytest.mark.parametrize("source", [*VERSIONS, "torch"])
def test_a_loop_gives_the_same_result_from_every_source(read, source):
    result = read(drawn(source))
    assert {kind: found.steps for kind, found in result.per_step.items()} == {"prefill": 1, "decode": 3}
    for kind in ("prefill", "decode"):
        assert counts(result)[kind, "schedule", "h2d_blocking"] == (1, 1)
        assert counts(result)[kind, "schedule", "h2d_pageable"] == (1, 1)
        assert counts(result)[kind, "forward", "d2h_pinned"] == (1, 1)
        assert counts(result)[kind, "forward", "kernel"] == (3, 3)
        assert counts(result)[kind, "forward", "sync"] == (1, 1)
    assert value(result, "step_ms") == pytest.approx(0.2)
    assert value(result, "range_ms.prepare") == pytest.approx(0.034)
    assert value(result, "forward_ms.decode") == pytest.approx(0.115)
    assert value(result, "forward_idle_us_per_step") == pytest.approx(3 * 85 / 4)
    assert value(result, "host_stall_us_per_step") == pytest.approx((4 * 10.9 + 4 * 10) / 4)
    assert result.labels.capture == ("torch" if source == "torch" else "nsys")
    assert result.labels.profiled and not result.labels.emulated
    # The result's copy is asynchronous, although the next range begins with a synchronisation of its stream.
    blocking = {(row.range, row.direction): row.blocking for row in result.copies}
    assert blocking == {("prepare", "h2d"): True, ("run_batch", "d2h"): False}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wait_for_a_result_belongs_to_its_step(read, version):
    """The overlapped loop waits for step k after the launch of k + 1."""
    syncs = [row for row in read(looped(version), "sglang").syncs if row.range == "settle"]
    assert [(row.kind, row.count) for row in syncs] == [("step", 4)]


def test_without_the_model_runners_ranges_kinds_are_unknown(read):
    result = read(looped())
    assert list(result.per_step) == ["step"]
    assert any("4 steps have no range for their kind" in note for note in notes(result))


def test_kinds_are_known_by_the_names_that_torch_gives_its_ranges_in_nvtx(read):
    export = looped(model=True)
    for row in export.rows["NVTX_EVENTS"]:
        row["text"] += ", op_id = 17" * row["text"].startswith("step[")
    steps = {kind: found.steps for kind, found in read(export).per_step.items()}
    assert steps == {"prefill": 1, "decode": 3}


def test_streams_have_the_names_that_their_own_process_gave_them(read):
    export = looped(steps=1)
    export.call("cudaMalloc", 500, 501, thread=78 << 24)
    for process, name in ((77, "uploads"), (78, "of another process")):
        export.put("TARGET_INFO_NVTX_CUDA_STREAM", streamId=7, name=name, contextId=1, processId=process)
    assert ("step", "uploads", "h2d") in counts(read(export))


def test_our_own_loop_is_read_by_its_payloads(read):
    export = Export("new")
    own_loop(export)
    export.named("sample", 1, 2)  # in NVTX's default domain
    result = read(export)
    steps = {kind: found.steps for kind, found in result.per_step.items()}
    assert steps == {"prefill": 1, "decode": 5, "decode.steady": 3}
    assert counts(result)["decode.steady", "forward", "kernel"] == (1, 1)
    assert not {"range_ms.not ours", "range_ms.sample"} & {*result.metrics}


def test_results_of_steps_before_the_capture_are_counted_apart(read):
    """The first result belongs to a step that is not in the capture, so there are more results than launches."""
    export = looped()
    export.rows["NVTX_EVENTS"] = [
        row
        for row in export.rows["NVTX_EVENTS"]
        if not (row["text"] == "scheduler.run_batch" and row["start"] < 100_000)
    ]
    result = read(export)
    assert result.per_step["step"].steps == 3
    assert any("1 result of steps that were launched before" in note for note in notes(result))
    settled = {row.kind: row.count for row in result.syncs if row.range == "settle"}
    assert settled == {"none": 1, "step": 3}


def test_a_stream_that_waits_for_another_is_held(read):
    """Stream 13 waits for stream 7's copy by an event recorded after it."""
    export = Export()
    for step in range(2):
        at = step * 200.0
        export.named("scheduler.run_batch", at, at + 50)
        slow = export.call("cudaMemcpyAsync", at + 1, at + 2)
        export.memcpy(slow, "HtoD (Pinned -> Device)", at + 3, at + 100, size=2**20, stream=7)
        export.record(at + 5, stream=7, event=9)
        export.wait_event(at + 6, stream=13, event=9)
        launch = export.call("cudaLaunchKernel", at + 8, at + 10)
        export.kernel(launch, at + 101, at + 150, stream=13)
    result = read(export, "sglang")
    assert not isinstance(result.idle, Abstained)
    assert result.idle.dependency_us == pytest.approx(90)
    without = read(export, "sglang", ("CUPTI_ACTIVITY_KIND_CUDA_EVENT",))
    assert any("no event records" in note for note in notes(without))


@pytest.mark.parametrize(
    ("table", "note"),
    [
        ("NVTX_EVENTS", "no NVTX ranges"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "no calls of CUDA's API"),
        ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "no synchronisation records"),
        ("ENUM_CUDA_MEM_KIND", None),
        ("TARGET_INFO_GPU", None),
        ("StringIds", "syncs are not counted"),
    ],
)
def test_a_missing_table_removes_only_what_depends_on_it(read, table, note):
    result = read(drawn("middle"), "sglang", (table,))
    assert result.copies, "copies are listed whatever else is missing"
    assert note is None or any(note in each for each in notes(result))
    assert not any("cut off" in each for each in notes(result))


def test_a_sync_without_a_record_has_no_stream(read):
    result = read(drawn("middle"), None, ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",))
    assert counts(result)["decode", "no stream", "sync"] == (1, 1)


def test_unexplained_numbers_are_identified_or_abstain(read):
    """Without an enumeration nsys's numbers differ from CUPTI's in the device side of copies."""
    explained = read(drawn("middle"), "sglang")
    assert counts(read(drawn("middle"), "sglang", ("ENUM_CUDA_MEM_KIND",))) == counts(explained)
    unknown = read(drawn("new"), "sglang", ("ENUM_CUDA_MEM_KIND",))
    assert ("decode", "schedule", "h2d_pageable") not in counts(unknown)
    assert counts(unknown)["decode", "schedule", "h2d"] == (1, 1)
    assert any("have no kinds of memory" in note for note in notes(unknown))


def test_a_capture_without_a_gpu_has_ranges_only(read):
    export = Export()
    own_loop(export)
    kinds = ("RUNTIME", "KERNEL", "SYNCHRONIZATION")
    result = read(export, None, tuple(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in kinds))
    assert value(result, "range_ms.model") == pytest.approx(0.019)
    assert result.per_step["decode"].steps == 5
    occupancy = result.metrics["forward_occupancy"]
    assert isinstance(occupancy, Abstained) and "no GPU activity" in occupancy.abstained
    assert isinstance(result.idle, Abstained)
    assert not result.copies and not result.syncs


def test_operations_that_cannot_be_placed_or_counted_are_noted(read):
    export = looped(steps=3)
    for row in export.rows["CUPTI_ACTIVITY_KIND_RUNTIME"]:
        row["correlationId"] = None
    for row in export.rows["CUPTI_ACTIVITY_KIND_MEMCPY"]:
        row["copyKind"] = None
    found = "\n".join(notes(read(export)))
    assert "15 operations have no call, hence no step" in found
    assert "6 copies are not counted" in found


def test_the_trace_mode_of_graphs_is_recorded(read):
    modes = {version: read(drawn(version)).environment["cuda_graph_trace"] for version in VERSIONS}
    assert modes == {"old": "unknown", "middle": "node", "new": "node"}
    own = Export()
    own_loop(own)
    assert read(own).environment["cuda_graph_trace"] == "none"


def test_graphs_traced_whole_count_once_with_a_note(read):
    export = looped()
    rows = export.rows.pop("CUPTI_ACTIVITY_KIND_KERNEL")
    for row in rows[::3]:
        export.put("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **{**row, "end": row["end"] + 80_000, "graphId": 3})
    result = read(export)
    assert counts(result)["step", "forward", "kernel"] == (1, 1)
    assert result.environment["cuda_graph_trace"] == "graph"
    assert any("traced whole" in note for note in notes(result))


def test_the_busiest_thread_is_reported_and_others_are_named(read):
    export = looped()
    for at in (1.0, 300.0):
        export.named("scheduler.run_batch", at, at + 5, thread=Export.MAIN + 1)
    result = read(export)
    assert result.per_step["step"].steps == 4
    assert any("1 more thread launches steps" in note for note in notes(result))


def test_operations_that_other_threads_launch_are_noted(read):
    export = looped()
    export.kernel(export.call("cudaLaunchKernel", 10, 12, thread=Export.MAIN + 1), 15, 20)
    assert any("1 operation was launched by other threads" in note for note in notes(read(export)))


def test_calls_of_another_thread_are_not_those_of_the_loop(read):
    """Of an export all numbers of threads are alike, so that none is guessed."""
    export = looped()
    for row in export.rows["CUPTI_ACTIVITY_KIND_RUNTIME"]:
        row["globalTid"] += 1
    result = read(export)
    assert not counts(result)
    assert any("20 operations were launched by other threads" in note for note in notes(result))


def test_what_is_no_capture_of_one_process_is_refused(read, tmp_path):
    """A database of another program; a trace of several ranks, as SGLang merges them."""
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as other:
        other.execute("CREATE TABLE names (name)")
    with pytest.raises(CaptureFileError, match="not an export of Nsight Systems"):
        Reader().read(tmp_path / "other.sqlite")
    ranks = [drawn("torch") for _ in range(2)]
    merged = [event | {"pid": f"[TP0{rank}] 0"} for rank, trace in enumerate(ranks) for event in trace.events]
    ranks[0].events = merged
    with pytest.raises(CaptureFileError, match="calls of 2 processes"):
        read(ranks[0])


def test_a_gpu_that_only_another_thread_uses_is_left_out(read):
    export = looped(model=True)
    alone = read(export)
    export.kernel(export.call("cudaLaunchKernel", 10, 12, thread=Export.MAIN + 1), 15, 900, stream=13)
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1]["deviceId"] = 1
    result = read(export)
    assert result.metrics == alone.metrics and counts(result) == counts(alone)
    assert any("left out: 1 operation of GPUs that only other threads use" in note for note in notes(result))
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0]["deviceId"] = 1
    assert any("operations of 2 GPUs" in note for note in notes(read(export)))


def test_a_result_has_nothing_of_the_environment(read):
    text = read(drawn("new")).to_json()
    assert "hunter2" not in text and "hostname-of-a-user" not in text and "API_KEY" not in text
    assert '"EXPORT_SCHEMA_VERSION": "3.7.2"' in text and "Made-up GPU" in text


@pytest.mark.parametrize("source", [*VERSIONS, "torch"])
def test_iterations_without_work_are_no_host_time(read, source):
    """The loop runs a hundred iterations before the next request arrives."""
    drawer = drawn(source)
    for turn in range(100):
        drawer.named("scheduler.recv_requests", 1000 + 10 * turn, 1005 + 10 * turn)
        drawer.named("scheduler.get_next_batch_to_run", 1005 + 10 * turn, 1009 + 10 * turn)
    drawer.named("scheduler.recv_requests", 2000, 2005)
    drawer.named("scheduler.get_next_batch_to_run", 2005, 2030)
    drawer.named("scheduler.run_batch", 2041, 2080)
    correlation = drawer.call("cudaLaunchKernel", 2050, 2055)
    drawer.kernel(correlation, 2060, 2150, stream=13)
    result = read(drawer)
    assert not isinstance(result.idle, Abstained)
    assert result.idle.no_work_us == pytest.approx(1000)
    assert value(result, "step_ms") == pytest.approx(0.2)
    assert not any("no work" in note for note in notes(result))


def test_a_map_without_idle_ranges_is_noted(read, tmp_path):
    text = (Path(maps.__file__).parent / "sglang.yaml").read_text().splitlines()
    (tmp_path / "m.yaml").write_text("\n".join(line for line in text if "loop:" not in line))
    result = read(drawn("middle"), str(tmp_path / "m.yaml"))
    assert any("has no ranges for time without work" in note for note in notes(result))


def test_ranges_that_overlap_without_nesting(read):
    """When a start/end range is still open as the next one opens, the later one counts as nested."""
    export = Export()
    export.named("scheduler.run_batch", 0, 50)
    export.named("scheduler.process_batch_result", 40, 90, kind=60)
    export.named("scheduler.run_batch", 80, 120)
    for at in (10, 45, 60, 100):
        export.copy("HtoD (Pinned -> Device)", at, size=8)
    found = read(export, "sglang")
    assert {row.range: row.count for row in found.copies} == {"run_batch": 2, "settle": 2}


def test_ranges_that_close_elsewhere_or_never_are_of_the_thread_that_opened_them(read):
    """Without its last launch, a step's kernels would count in the step before it."""
    export = looped()
    *_, crossing, open_at_the_end = (
        row for row in export.rows["NVTX_EVENTS"] if row["text"] == "scheduler.run_batch"
    )
    crossing |= {"eventType": 60, "endGlobalTid": Export.MAIN + 1}
    open_at_the_end["end"] = None
    result = read(export)
    assert result.per_step["step"].steps == 4
    assert counts(result)["step", "forward", "kernel"] == (3, 3)


def test_what_is_issued_between_two_ranges_belongs_to_the_step_of_the_first(read):
    """As in a run. Each step also uploads once inside a range. Nothing belongs to the last range."""
    export = looped()
    for at in (81.0, 281.0, 481.0, 681.0, 960.0):
        export.copy("HtoD (Pageable -> Device)", at, size=8)
    assert counts(read(export))["step", "schedule", "h2d"] == (2, 2)


def test_a_draft_is_no_step_of_its_own_in_step_times(read):
    """A draft is launched together with the verify that it belongs to."""
    export = Export()
    export.domain(5, "schedbench")
    for step in range(0, 8, 2):
        at = step * 100.0
        for number, kind, offset in ((step, "draft", 0), (step + 1, "verify", 30)):
            export.named("model", at + offset, at + offset + 20, payload=number, domain=5)
            export.mark(f"{kind} bs=2", at + offset + 21, payload=number, domain=5)
    result = read(export)
    assert {kind: found.steps for kind, found in result.per_step.items()} == {"draft": 4, "verify": 4}
    assert value(result, "step_ms") == pytest.approx(0.2)


def test_only_a_sleep_that_took_time_interrupts_the_period_of_the_loop(read):
    export = Export()
    export.domain(5, "schedbench")
    for step, at in enumerate((0.0, 100.0, 400.0)):
        export.mark("decode bs=2", at, payload=step, domain=5)
    export.named("sleep", 50, 50, domain=5)
    export.named("sleep", 150, 350, domain=5)
    assert value(read(export), "step_ms") == pytest.approx(0.1)


def test_a_fresh_trace_of_torch_is_read(tmp_path):
    """The program has SGLang's ranges and runs on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        for step in range(4):
            with record_function("scheduler.get_next_batch_to_run"):
                torch.ones(8).sum()
            with record_function("scheduler.run_batch"), record_function(f"step[decode bs={step + 1}]"):
                torch.ones(8) @ torch.ones(8)
            with record_function("scheduler.process_batch_result"):
                torch.ones(8).tolist()
    recorded.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    result = Reader().read(tmp_path / "trace.json.gz")
    assert result.per_step["decode"].steps == 4
    assert value(result, "range_ms.run_batch") > value(result, "range_ms.model") > 0
    assert any("no GPU activity" in note for note in notes(result))
