"""How sampled tokens become the next step's input: ``resolve``, ``publish``, ``stash``, ``conclude``, ``mix``, and what
happens to the bridge when rows leave or join."""

from __future__ import annotations

import torch

from ..batch import ScheduleBatch, StepResult
from .desk import Desk


def resolve_late(desk: Desk, batch: ScheduleBatch) -> None:
    """Upload the staged prompt, or gather the rows' last tokens, or both (#25945)."""
    _resolve(desk, batch, keep_running_indices=False)


def resolve_late_recorded(desk: Desk, batch: ScheduleBatch) -> None:
    """As ``resolve_late``; the gather's index is recorded on this stream, because the field that held it is cleared
    before anything else keeps it and the schedule stream's allocator could re-issue its block."""
    _resolve(desk, batch, keep_running_indices=True)


def _resolve(desk: Desk, batch: ScheduleBatch, *, keep_running_indices: bool) -> None:
    tokens = desk.futures.output_tokens_buf
    if batch.prefill_input_ids_cpu is not None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(desk.device, non_blocking=True)
        if batch.mix_running_indices is not None:
            if keep_running_indices:
                desk.streams.record(batch.mix_running_indices, desk.streams.forward)
            running = tokens[batch.mix_running_indices]
            batch.input_ids = torch.cat([batch.input_ids, running])
        batch.prefill_input_ids_cpu = None
        batch.mix_running_indices = None
    elif batch.input_ids is None:
        batch.input_ids = tokens[batch.req_pool_indices]


def publish_next_lengths(desk: Desk, batch: ScheduleBatch) -> None:
    """Length of each request's next step. Without speculation nobody reads it since #26020: a dead write, kept
    because upstream makes it."""
    assert batch.req_pool_indices is not None and batch.seq_lens is not None
    desk.futures.publish(batch.req_pool_indices, batch.seq_lens + 1)


def stash_by_row(desk: Desk, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    desk.futures.stash(rows, token_ids)


def drop_input(desk: Desk, batch: ScheduleBatch, result: StepResult) -> None:  # noqa: ARG001
    """The relay holds the tokens; the batch carries no input between steps."""
    batch.input_ids = None


def mix_by_index(desk: Desk, prefill: ScheduleBatch, running: ScheduleBatch) -> None:  # noqa: ARG001
    """Remember which rows' tokens follow the prompt; they are gathered by ``resolve``."""
    prefill.mix_running_indices = running.req_pool_indices


def filter_input(desk: Desk, batch: ScheduleBatch, keep: torch.Tensor) -> None:  # noqa: ARG001
    if batch.input_ids is not None:
        batch.input_ids = batch.input_ids[keep]


def merge_input_two_sided(desk: Desk, batch: ScheduleBatch, other: ScheduleBatch) -> None:  # noqa: ARG001
    """A missing side makes the whole missing: every row is then gathered from the relay (#25945)."""
    if batch.input_ids is not None and other.input_ids is not None:
        batch.input_ids = torch.cat([batch.input_ids, other.input_ids])
    else:
        batch.input_ids = None
