"""Kineto's rows joined with the run's log: the step, the line and the waits of each operation."""

from __future__ import annotations

import pytest

from schedbench.profiles.record.timeline import NO_SITE, Wait

H2D_PINNED = "HtoD (Pinned -> Device)"
H2D_PAGEABLE = "HtoD (Pageable -> Device)"
D2H_PINNED = "DtoH (Device -> Pinned)"
D2H_PAGEABLE = "DtoH (Device -> Pageable)"


def test_an_operation_belongs_to_the_range_and_line_that_launched_it(trace, log, joined):
    log.draw("prepare", 3, 0, 10)
    log.draw("model", 3, 10, 20)
    log.calling(5, 11, 14)
    trace.launch(2)
    trace.launch(12, stream=13)
    first, second = joined().window.ops
    assert (first.range, first.step, first.forward, first.site) == ("prepare", 3, False, NO_SITE)
    assert (second.range, second.step, second.forward, second.site) == ("model", 3, True, 5)
    assert [joined().window.calls[i].site for i in (0, 1)] == [NO_SITE, 5]


def test_an_operation_belongs_to_its_launch_although_it_ran_later(trace, log, joined):
    log.draw("prepare", 3, 0, 10)
    log.draw("prepare", 4, 90, 110)
    correlation = trace.call("cudaLaunchKernel", 2, 3)
    trace.kernel(correlation, 100, 105)
    (op,) = joined().window.ops
    assert (op.step, op.launched, op.start) == (3, 3_000, 100_000)


def test_a_kernel_started_during_its_call_counts_as_launched_at_its_start(trace, joined):
    correlation = trace.call("cudaLaunchKernel", 0, 9)
    trace.kernel(correlation, 4, 5)
    (op,) = joined().window.ops
    assert op.launched == op.start == 4_000


def test_no_operation_was_launched_before_its_call(trace, joined):
    """The device's clock runs behind: its copy must not lose the call that the host waited in."""
    correlation = trace.call("cudaMemcpyAsync", 20, 90)
    trace.memcpy(correlation, D2H_PAGEABLE, 18, 80, size=8)
    (op,) = joined().window.ops
    assert (op.launched, op.start) == (20_000, 18_000)


def test_streams_have_their_names_and_others_their_numbers(trace, streams, joined):
    trace.launch(0, stream=7)
    trace.launch(10, stream=13)
    trace.launch(20, stream=21)
    assert [streams.names[op.stream] for op in joined().window.ops] == ["schedule", "forward", "stream 21"]


def test_every_kernel_of_a_replay_belongs_to_the_replay(trace, log, joined):
    log.draw("model", 1, 0, 10)
    correlation = trace.call("cudaGraphLaunch", 1, 3)
    for n in range(4):
        trace.kernel(correlation, 5 + n, 5.5 + n, stream=13)
    window = joined().window
    assert [(op.step, op.range, op.launched) for op in window.ops] == [(1, "model", 3_000)] * 4
    assert [call.kind for call in window.calls] == ["graph"]


def test_a_blocking_copy_is_a_copy_and_a_sync(trace, log, joined):
    log.draw("prepare", 1, 0, 40)
    log.calling(9, 1, 20)
    trace.copy(H2D_PAGEABLE, 2, size=64, blocking=True)
    window = joined().window
    (op,) = window.ops
    assert (op.kind, op.host_memory, op.bytes, op.blocking) == ("h2d", "pageable", 64, True)
    copy, sync = window.calls
    assert (copy.kind, copy.name, copy.waited) == ("copy", "cudaMemcpyAsync", 0)
    assert (sync.kind, sync.name, sync.site, sync.waited) == ("sync", "cudaStreamSynchronize", 9, 10_900)
    assert copy.stream == sync.stream == op.stream


def test_a_sync_of_another_call_does_not_make_the_copy_blocking(trace, log, joined):
    log.calling(1, 0, 1.05)
    log.calling(2, 1.06, 20)
    trace.copy(H2D_PINNED, 0, size=64, blocking=True)
    (op,) = joined().window.ops
    assert not op.blocking


def test_a_sync_of_another_stream_does_not_make_the_copy_blocking(trace, joined):
    trace.copy(H2D_PINNED, 0, size=64, stream=13)
    trace.synchronize(1.1, 12, stream=7)
    (op,) = joined().window.ops
    assert not op.blocking


def test_a_query_between_copy_and_sync_changes_nothing(trace, joined):
    correlation = trace.call("cudaMemcpyAsync", 0, 1)
    trace.memcpy(correlation, H2D_PINNED, 2, 3, size=8)
    trace.call("cudaStreamIsCapturing", 1.1, 1.2)
    trace.synchronize(1.3, 9, stream=7)
    assert joined().window.ops[0].blocking


def test_a_short_sync_did_not_wait(trace, joined):
    trace.launch(0)
    trace.synchronize(10, 14.9, stream=7)
    trace.synchronize(20, 25.1, stream=7)
    assert [call.waited for call in joined().window.calls if call.kind == "sync"] == [0, 5_100]


def test_an_event_sync_is_listed_on_the_events_stream(trace, log, streams, joined):
    forward = streams.by_cupti(13)
    log.calling(4, 0, 10, stream=forward)
    trace.launch(20, stream=13)
    trace.call("cudaEventSynchronize", 1, 9)
    (sync,) = [call for call in joined().window.calls if call.kind == "sync"]
    assert (sync.stream, sync.site, sync.waited) == (forward, 4, 8_000)


def test_kinetos_sync_record_names_the_events_stream(trace, streams, joined):
    trace.event_sync(1, 9, source=13)
    trace.call("cudaEventSynchronize", 11, 12)
    known, unknown = joined().window.calls
    assert (known.stream, unknown.stream) == (streams.by_cupti(13), -1)


def test_allocation_calls_wait_but_are_no_syncs(trace, joined):
    trace.launch(0)
    trace.call("cudaMalloc", 5, 300)
    call = joined().window.calls[-1]
    assert (call.kind, call.waited) == ("event", 295_000)


@pytest.mark.parametrize(
    ("name", "what", "size", "waits"),
    [
        ("cudaMemcpyAsync", H2D_PAGEABLE, 65536, False),  # the driver copies it within the call
        ("cudaMemcpyAsync", H2D_PAGEABLE, 65537, True),
        ("cudaMemcpyAsync", H2D_PINNED, 10**6, False),
        ("cudaMemcpyAsync", D2H_PAGEABLE, 4, True),
        ("cudaMemcpyAsync", D2H_PINNED, 10**6, False),
        ("cudaMemcpy", D2H_PINNED, 64, True),
        ("cuMemcpyHtoD", H2D_PINNED, 64, True),
        ("cudaMemcpy", "HtoD (Managed -> Device)", 64, True),
        ("cudaMemcpyAsync", "DtoH (Device -> Unknown)", 64, False),
        ("cudaMemcpy", "DtoD (Device -> Device)", 64, False),
    ],
)
def test_without_a_sync_the_drivers_rule_decides_whether_a_copy_blocks(
    trace, joined, name, what, size, waits
):
    """The host waits in the calls of copies that block."""
    correlation = trace.call(name, 0, 100)
    trace.memcpy(correlation, what, 50, 99, size=size)
    trace.launch(101)
    window = joined().window
    assert [(call.kind, call.waited) for call in window.calls] == [("copy", 100_000 * waits), ("launch", 0)]
    assert window.ops[0].blocking is waits


def test_launches_through_the_driver_are_joined(trace, log, joined):
    log.draw("model", 2, 0, 10)
    correlation = trace.call("cuLaunchKernelEx", 1, 2, cat="cuda_driver")
    trace.kernel(correlation, 3, 4, stream=13)
    (op,) = joined().window.ops
    assert (op.step, op.range) == (2, "model")


def test_a_copy_without_a_call_is_counted_apart(trace, joined):
    trace.memcpy(-1, H2D_PINNED, 0, 1, size=8)
    trace.call("cudaMemcpyAsync", 0, 1)
    trace.events[-1]["args"] = {}
    result = joined()
    assert result.notes["operations_without_call"] == 1
    (op,) = result.window.ops
    assert (op.step, op.range, op.launched) == (-1, "", op.start)


def test_calls_of_other_threads_are_left_out(trace, log, joined):
    log.draw("prepare", 1, 0, 10)
    correlation = trace.call("cudaLaunchKernel", 1, 2, tid=trace.OTHER)
    trace.kernel(correlation, 3, 4)
    result = joined()
    assert result.window.calls == []
    assert result.window.ops[0].step == -1
    assert result.notes["calls_of_other_threads"] == 1


def test_a_wait_holds_the_stream_until_the_awaited_work_is_done(trace, log, streams, joined):
    log.draw("resolve", 1, 0, 30)
    trace.launch(0, stream=7, duration=40)  # runs 2 to 42
    record = trace.call("cudaEventRecord", 2, 3)
    trace.launch(4, stream=7, duration=90)  # after the record, so no stream waits for it
    trace.wait_event(6, stream=13, source=7, record=record)
    assert joined().window.waits == [Wait(streams.by_cupti(13), 6_500, 42_000, 1)]


def test_a_wait_for_finished_work_holds_nothing(trace, joined):
    trace.launch(0, stream=7)
    record = trace.call("cudaEventRecord", 2, 3)
    trace.wait_event(50, stream=13, source=7, record=record)
    trace.wait_event(60, stream=13, source=7, record=-1)
    assert joined().window.waits == []


def test_a_window_abstains_if_it_ends_before_its_last_step(trace, log, joined):
    assert joined().abstained is None
    log.step(1)
    log.draw("model", 1, 0, 10)
    trace.launch(2)
    assert joined().abstained is None
    log.step(3)
    assert "step 3 was launched, the last recorded operation is of step 1" in (joined().abstained or "")


def test_a_trace_without_gpu_events_names_possible_causes(trace, log, joined):
    log.step(1)
    trace.call("cudaLaunchKernel", 0, 1)
    assert "permission" in (joined().abstained or "")


def test_operations_outside_the_window_are_left_out(trace, joined):
    trace.launch(-20)
    trace.launch(5)
    trace.call("cudaDeviceSynchronize", 10**6 + 1, 10**6 + 50)
    window = joined().window
    assert [op.start for op in window.ops] == [7_000]
    assert [call.kind for call in window.calls] == ["launch"]


def test_the_window_includes_operations_that_end_late(trace, joined):
    correlation = trace.call("cudaLaunchKernel", 999_998, 999_999)
    trace.kernel(correlation, 999_999, 1_000_100)
    assert joined().window.end == 1_000_100_001


def test_without_sync_records_a_blocking_copy_has_its_sync_on_its_stream(trace, streams, joined):
    trace.copy(H2D_PINNED, 0, size=8, stream=13, blocking=True)
    trace.events = [event for event in trace.events if event.get("cat") != "cuda_sync"]
    copy, sync = joined().window.calls
    assert copy.stream == sync.stream == streams.by_cupti(13)
    assert joined().window.ops[0].blocking
