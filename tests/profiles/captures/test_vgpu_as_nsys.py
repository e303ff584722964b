"""A virtual GPU's run, written as Nsight Systems would write it and read as a user's file: the counts equal the run's
own."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from pathlib import Path

import pytest

from schedbench.profiles.captures.files import Reader
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.recording import FILE, RecordedTimeline, TimelineRecording, read_recording
from schedbench.profiles.record.result import Result
from tests.profiles.captures.exports import Export

WAYS = {"h2d": "HtoD ({} -> Device)", "d2h": "DtoH (Device -> {})", "d2d": "DtoD (Device -> Device)"}
SMALL = (
    "workload.requests=8",
    "workload.output_tokens={dist: uniform, min: 4, max: 16}",
    "workload.prompt_tokens={dist: uniform, min: 129, max: 300}",
    "measure.warmup_requests=0",
)
NONE = "device.values=none"  # copies do not depend on values
RUNS = {
    "overlapped": ("mixed", NONE),
    "serial": ("mixed", NONE, "engine.overlap=false"),
    "sampled": ("mixed", NONE, "workload.sampling={temperature: 0.7, top_k: 5, frequency_penalty: 0.5}"),
    "speculative": ("spec_v2",),
}


@pytest.fixture(params=RUNS.values(), ids=RUNS)
def run(request, tmp_path) -> tuple[Result, RecordedTimeline]:
    scenario, *more = request.param
    question = ask(scenario, (*SMALL, *more))
    with TimelineRecording(tmp_path / FILE) as recording:
        result = execute(question, Options(device="vgpu"), extra_sinks=[recording])
    return result, read_recording(tmp_path / FILE)


def written(recorded: RecordedTimeline, path: Path) -> Path:
    """Writes every operation with the correlation of the call that it came from, and every record with its instant."""
    export = Export("new")
    export.domain(5, "schedbench")
    for number, name in recorded.streams.items():
        export.put("TARGET_INFO_NVTX_CUDA_STREAM", streamId=number, name=name, contextId=1, processId=77)
    calls = sorted(
        (call for w in recorded.windows for call in w.calls), key=lambda call: (call.start, call.end)
    )
    numbers = [_call(export, call) for call in calls]
    ends = [call.end for call in calls]
    for window in recorded.windows:
        for op in window.ops:
            _operation(export, numbers[min(bisect_left(ends, op.launched), len(numbers) - 1)], op)
        for held in window.ranges:
            export.named(held.name, held.start / 1e3, held.end / 1e3, payload=held.step, domain=5)
    _marks(export, recorded)
    return export.write(path)


def _call(export, call) -> int:
    correlation = export.call(call.name, call.start / 1e3, call.end / 1e3)
    if call.kind == "sync":
        of_event = call.name == "cudaEventSynchronize"
        if of_event:
            export.put(
                "CUPTI_ACTIVITY_KIND_CUDA_EVENT", streamId=call.stream, eventId=correlation, globalPid=77 << 24,
                correlationId=correlation - 1, deviceId=0, contextId=1,
            )  # fmt: skip
        more = {"syncType": 1 if of_event else 3, "eventId": correlation}
        stream = 0 if of_event else call.stream
        export._operation("SYNCHRONIZATION", correlation, call.start / 1e3, call.end / 1e3, stream, **more)
    return correlation


def _operation(export, correlation: int, op) -> None:
    start, end = op.start / 1e3, op.end / 1e3
    if op.kind == "kernel":
        export.kernel(correlation, start, end, stream=op.stream)
    else:
        way = WAYS[op.kind].format(op.host_memory.capitalize())
        export.memcpy(correlation, way, start, end, size=op.bytes, stream=op.stream)


def _marks(export, recorded: RecordedTimeline) -> None:
    """Writes launches and settlings in the order in which they came, each at its own instant."""
    at = 0
    for window in recorded.windows:
        for info in window.launched:
            at += 1
            export.mark(f"{info.kind} bs={info.batch_size}", at / 1e3, payload=info.step, domain=5)
        for info in window.settled:
            at += 1
            steady = " steady" if info.steady else ""
            export.mark(f"settled {info.kind}{steady}", at / 1e3, payload=info.step, domain=5)


def counted(result: Result) -> dict[tuple[str, ...], object]:
    """Counts without kernels: a replayed graph is one record of the virtual GPU, and some kernels belong to no step."""
    found: dict[tuple[str, ...], object] = {}
    for kind, counts in result.per_step.items():
        found[kind, "steps"] = counts.steps
        for stream, counters in counts.streams.items():
            found |= {(kind, stream, name): tally for name, tally in counters.items() if name != "kernel"}
    return found


def copies(result: Result) -> Counter[tuple[object, ...]]:
    """Copies and their bytes by range, because a capture has no lines; a capture has no record of what kernels read on
    the host."""
    found: Counter[tuple[object, ...]] = Counter()
    for row in result.copies:
        if row.direction != "kernel":
            place = row.kind, row.range, row.stream, row.direction, row.host_memory, row.blocking
            found.update({(*place, "copies"): row.count, (*place, "bytes"): row.bytes})
    return found


def syncs(result: Result) -> Counter[tuple[object, ...]]:
    found: Counter[tuple[object, ...]] = Counter()
    for row in result.syncs:
        if row.sync:
            found[row.kind, row.range, row.stream, row.call] += row.count
    return found


def test_the_counts_equal_those_of_the_run(run, tmp_path):
    result, recorded = run
    read = Reader("schedbench").read(written(recorded, tmp_path / "run.sqlite"))
    assert counted(read) == counted(result)
    assert copies(read) == copies(result)
    assert syncs(read) == syncs(result)
    assert len(copies(read)) > 10
