"""A virtual GPU's run, written as Kineto would write it and joined again: the counts equal the virtual GPU's own."""

from __future__ import annotations

from bisect import bisect_left
from itertools import count, pairwise

import pytest

from schedbench.profiles.cuda.join import Joined
from schedbench.profiles.cuda.kineto import rows
from schedbench.profiles.cuda.log import NO_CALL, NO_CONTEXT, CallRecord, Log, StreamTable
from schedbench.profiles.measure.counts import CountsSink
from schedbench.profiles.platform.resolve import resolve
from schedbench.profiles.run.machines import open_machine
from schedbench.profiles.run.runner import GatedSink, PreparedRun, unobserved
from schedbench.scenarios.loader import load
from tests.profiles.recorders import WindowRecorder

MAIN = 4242
MEMCPY = {
    ("h2d", "pinned"): "Memcpy HtoD (Pinned -> Device)",
    ("h2d", "pageable"): "Memcpy HtoD (Pageable -> Device)",
    ("d2h", "pinned"): "Memcpy DtoH (Device -> Pinned)",
    ("d2h", "pageable"): "Memcpy DtoH (Device -> Pageable)",
    ("d2d", ""): "Memcpy DtoD (Device -> Device)",
}
SMALL = [
    "workload.requests=8",
    "workload.output_tokens={dist: uniform, min: 4, max: 16}",
    "workload.prompt_tokens={dist: uniform, min: 129, max: 300}",
    "measure.warmup_requests=0",
]


RUNS = {
    "overlapped": [],
    "serial": ["engine.overlap=false"],
    "paged": ["engine.cuda_graph=false", "engine.page_size=16", "workload.arrival.process=burst"],
    "packed": [
        "engine.relay={state: pr25945, sampling_tensors: packed}",
        "workload.sampling={temperature: 0.7, top_k: 5, frequency_penalty: 0.5}",
    ],
}


@pytest.fixture(params=RUNS.values(), ids=RUNS)
def recorder(request):
    resolved = resolve(load("mixed", [*SMALL, *request.param]))
    recorder = WindowRecorder()
    with open_machine("vgpu", resolved, recorder) as machine:
        PreparedRun(resolved, machine, GatedSink()).measure(unobserved)
        recorder.streams = dict(machine.names.streams)
    return recorder


def written(recorder):
    """Returns the Chrome trace and the log: every call has a correlation, and every operation that of its call."""
    calls = sorted(recorder.calls, key=lambda call: (call.start, call.end))
    ends = [call.end for call in calls]
    events = [
        _event("cuda_runtime", call.name, call, MAIN, {"correlation": n}) for n, call in enumerate(calls)
    ]
    for n, call in enumerate(calls):
        if call.kind == "sync":
            of_event = call.name == "cudaEventSynchronize"
            where = {"stream": -1, "wait_on_stream": call.stream} if of_event else {"stream": call.stream}
            events.append(_event("cuda_sync", call.name, call, 0, {"correlation": n, **where}))
    for op in recorder.ops:
        correlation = bisect_left(ends, op.launched)
        name = MEMCPY.get((op.kind, op.host_memory), op.kind)
        category = "kernel" if op.kind == "kernel" else "gpu_memcpy"
        args = {"correlation": correlation, "stream": op.stream, "bytes": op.bytes}
        events.append(_event(category, name, op, op.stream, args))
    return {"traceEvents": events, "baseTimeNanoseconds": 0}, _log(recorder, calls)


def _event(category, name, record, tid, args):
    times = {"ts": record.start / 1000, "dur": (record.end - record.start) / 1000}
    return {"ph": "X", "cat": category, "name": name, "tid": tid, "args": args, **times}


def _log(recorder, calls):
    log = Log(
        launched=[info for window in recorder.windows for info in window.launched],
        settled=[info for window in recorder.windows for info in window.settled],
    )
    ranges = sorted(recorder.ranges, key=lambda r: (r.start, -r.end))
    edges = sorted({edge for r in ranges for edge in (r.start, r.end)})
    for edge in edges:
        context = NO_CONTEXT
        for held in ranges:
            if held.start <= edge < held.end:
                context = context.inside(held.name, held.step)
        log.contexts.change(edge, context)
    numbers = count(1)
    number = next(numbers)
    for before, call in pairwise([calls[0], *calls]):
        same = before.kind == "copy" and call.start == before.end and call.site == before.site
        number = number if same else next(numbers)
        log.calls.change(call.start, CallRecord(call.site, number, -1))
        log.calls.change(call.end, NO_CALL)
    return log


def counted(windows):
    sink = CountsSink(lambda _: 0)
    for window in windows:
        sink.feed(window)
    sink.finish()
    # Without kernels: a replayed graph is one record of the virtual GPU.
    tallies = {place: tally for place, tally in sink.tallies().items() if place[-1] != "kernel"}
    copies = {line: (cost.count, cost.bytes) for line, cost in sink.copies.items()}
    syncs = {line: cost.count for line, cost in sink.calls.items() if line[-1]}
    return dict(sink.steps), tallies, copies, syncs


def test_the_counts_equal_those_of_the_run(recorder):
    document, log = written(recorder)
    streams = StreamTable()
    for number, name in recorder.streams.items():
        streams.announce(name, number)
        streams.identify(number, number)
    joined = Joined(rows(document), log, streams, frozenset({MAIN}), 0, 65536, start=0, end=1 << 62)
    assert joined.abstained is None
    window = joined.window
    theirs = {streams.by_cupti(number): number for number in recorder.streams}
    window.ops = [op._replace(stream=theirs[op.stream]) for op in window.ops]
    window.calls = [
        call._replace(stream=theirs[call.stream]) for call in window.calls if call.kind != "event"
    ]
    assert len(counted(recorder.windows)[2]) > 10
    for expected, found in zip(counted(recorder.windows), counted([window]), strict=True):
        assert found == expected
