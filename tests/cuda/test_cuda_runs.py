"""Whole runs on CUDA: the same tokens in both loops, the counts of a steady decode, and torch's copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from schedbench.profiles.record.result import Outputs, SitePart
from schedbench.sched.observe import Clock, Observer, StepInfo

pytestmark = pytest.mark.cuda


def tokens(result):
    return {row.id: row.token_ids for row in result.requests}


def rows(result, statement):
    found = [
        row for row in result.copies if isinstance(row.site, SitePart) and statement in row.site.statement
    ]
    assert found, f"no copy at {statement!r}"
    return found


def test_both_passes_are_complete_and_agree(overlapped):
    passes = overlapped.environment["passes"]
    assert "abstained" not in passes, passes
    assert isinstance(overlapped.outputs, Outputs), overlapped.outputs
    assert {row.status for row in overlapped.requests} == {"finished"}


@pytest.mark.parametrize("override", ["engine.overlap=false", "engine.cuda_graph=false"])
def test_the_serial_loop_and_a_run_without_graphs_give_the_same_tokens(run, overlapped, override):
    assert tokens(run(override)) == tokens(overlapped)


def test_a_steady_decode_copies_once_and_waits_once(overlapped):
    counts = overlapped.per_step["decode.steady"]
    assert counts.steps > 0
    schedule = counts.streams.get("schedule", {})
    assert {name: schedule[name].max for name in ("h2d", "d2h", "sync") if name in schedule} == {}
    forward = counts.streams["forward"]
    assert (forward["d2h"].max, forward["sync"].max) == (1, 1)
    assert "h2d" not in forward


def test_streams_have_their_names(overlapped):
    streams = {name for counts in overlapped.per_step.values() for name in counts.streams}
    assert streams <= {"schedule", "forward", "copy"}


def test_a_list_made_on_the_device_is_a_pageable_blocking_upload(overlapped):
    for row in rows(overlapped, "torch.tensor(addresses"):
        assert (row.direction, row.host_memory, row.blocking) == ("h2d", "pageable", True)


def test_a_prompt_from_pinned_memory_does_not_block(overlapped):
    for row in rows(overlapped, "batch.prefill_input_ids_cpu.to"):
        assert (row.direction, row.host_memory, row.blocking, row.stream) == (
            "h2d",
            "pinned",
            False,
            "forward",
        )


def test_tokens_are_downloaded_into_pinned_memory(overlapped):
    for row in rows(overlapped, 'token_ids.to("cpu"'):
        assert (row.direction, row.host_memory, row.blocking) == ("d2h", "pinned", False)


def test_the_timed_pass_measures_times(overlapped):
    for name in ("output_throughput", "forward_occupancy", "step_ms", "ttft_ms"):
        assert overlapped.metrics[name].values[0] > 0
    assert not overlapped.labels.emulated


class Strict(Observer):
    """Makes torch raise at a blocking call once only decodes are left. Waiting for the result's event is not a blocking
    call."""

    def launched(self, info: StepInfo) -> None:
        torch.cuda.set_sync_debug_mode("error" if info.kind == "decode" else "default")


@contextmanager
def strict(clock: Clock, total: int) -> Iterator[Observer]:  # noqa: ARG001
    try:
        yield Strict()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_decodes_make_no_blocking_call(run):
    result = run("engine.chunked_prefill_size=2048", "engine.mixed_chunk=false", observe=strict)
    assert {row.status for row in result.requests} == {"finished"}
