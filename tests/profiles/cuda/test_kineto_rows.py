"""Rows of a Kineto trace: which are kept, how calls and copies are classified, and missing fields."""

from __future__ import annotations

import pytest

from schedbench.profiles.cuda.kineto import call_kind, op_kind, rows

MEMCPY = [
    ("HtoD (Pinned -> Device)", ("h2d", "pinned")),
    ("HtoD (Pageable -> Device)", ("h2d", "pageable")),
    ("DtoH (Device -> Pinned)", ("d2h", "pinned")),
    ("DtoH (Device -> Pageable)", ("d2h", "pageable")),
    ("DtoD (Device -> Device)", ("d2d", "")),
    ("PtoP (Device -> Device)", ("d2d", "")),
    ("HtoD (Managed -> Device)", ("h2d", "")),
    ("DtoH (Device -> Unknown)", ("d2h", "")),
    ("HtoH (Pageable -> Pinned)", None),
]


@pytest.mark.parametrize(("name", "kind"), MEMCPY)
def test_copies_are_classified_by_direction_and_host_memory(trace, name, kind):
    trace.memcpy(1, name, 0, 1, size=64)
    (row,) = rows(trace.document())
    assert op_kind(row) == kind
    assert row.bytes == 64


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [(12.345, 15.346, (12_345, 15_346)), (12, 11, (12_000, 12_000))],
    ids=["positive", "a negative duration, which is none"],
)
def test_instants_are_nanoseconds_since_1970(trace, start, end, found):
    trace.kernel(1, start, end)
    (row,) = rows(trace.document())
    assert (row.start - trace.BASE, row.end - trace.BASE) == found


def test_a_trace_without_a_base_counts_from_1970(trace):
    trace.kernel(1, 1e6, 1e6 + 2)
    document = trace.document()
    del document["baseTimeNanoseconds"]
    assert rows(document)[0].start == 10**9


def test_annotations_on_the_gpu_are_left_out(trace):
    trace.annotation("step", 0, 100)
    trace.kernel(1, 1, 2)
    assert [row.category for row in rows(trace.document())] == ["kernel"]


def test_missing_fields_are_minus_one(trace):
    trace.events.append({"ph": "X", "cat": "kernel", "name": "k", "ts": 1})
    trace.events.append(
        {"ph": "X", "cat": "cuda_sync", "name": "Context Sync", "ts": 2, "tid": "?", "args": {}}
    )
    first, second = rows(trace.document())
    assert (first.stream, first.correlation, first.bytes, first.end - first.start) == (-1, -1, 0, 0)
    assert (second.thread, second.stream) == (-1, -1)


def test_rows_come_in_order_of_time(trace):
    trace.kernel(1, 5, 6)
    trace.kernel(2, 1, 2)
    assert [row.correlation for row in rows(trace.document())] == [2, 1]


@pytest.mark.parametrize("document", [{}, {"traceEvents": None}, {"traceEvents": {}}])
def test_a_file_other_than_a_trace_is_refused(document):
    with pytest.raises(ValueError, match="not a Chrome trace"):
        rows(document)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaMemcpyAsync", "copy"),
        ("cudaMemcpyAsync_v3020", "copy"),
        ("cudaMemsetAsync_ptsz", "copy"),
        ("cudaLaunchKernel_v7000", "launch"),
        ("cudaLaunchKernelExC", "launch"),
        ("cuLaunchKernelEx", "launch"),
        ("cudaGraphLaunch_ptsz_v10000", "graph"),
        ("cudaStreamSynchronize", "sync"),
        ("cudaEventSynchronize", "sync"),
        ("cudaDeviceSynchronize", "sync"),
        ("cuStreamSynchronize", "sync"),
        ("cuEventSynchronize", "sync"),
        ("cuCtxSynchronize", "sync"),
        ("cudaEventRecordWithFlags", "event"),
        ("cudaStreamWaitEvent", "event"),
        ("cudaMalloc", "memory"),
        ("cudaHostAlloc", "memory"),
        ("cuMemFree_v2", "memory"),
        ("cudaEventQuery", None),
        ("cudaStreamIsCapturing", None),
    ],
)
def test_calls_are_classified_by_prefix(trace, name, kind):
    trace.call(name, 0, 1)
    (row,) = rows(trace.document())
    assert call_kind(row.name) == kind
    assert not row.name.endswith(("_ptsz", "_v3020", "_v10000", "_v7000"))
