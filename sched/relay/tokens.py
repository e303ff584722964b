"""How sampled tokens become the next step's input by request slot, from #25862 on, also when rows leave or join."""

from __future__ import annotations

import torch

from ..batch import FutureIndices, ScheduleBatch, StepResult
from ..kernels.placement import decode_inputs
from .context import RelayContext


def open_rows(context: RelayContext, batch: ScheduleBatch) -> FutureIndices:
    return context.futures.take(batch.req_pool_indices)


def resolve_late(context: RelayContext, batch: ScheduleBatch) -> None:
    """Upload the staged prompt, or gather the rows' last tokens, or both (#25945)."""
    if batch.prefill_input_ids_cpu is not None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(context.device, non_blocking=True)
        if batch.mix_running_indices is not None:
            _append_running(context, batch, batch.mix_running_indices)
        batch.prefill_input_ids_cpu = None
        batch.mix_running_indices = None
    elif batch.input_ids is None:
        batch.input_ids = context.futures.output_tokens_buf[batch.req_pool_indices]


def resolve_fused(context: RelayContext, batch: ScheduleBatch) -> None:
    """A decode's tokens, positions and pages in one launch; decodes behind a prompt are gathered.

    The sources of a mixed step's ids are recorded on this stream, since no field holds them while the forward runs.
    """
    if batch.mix_running_indices is not None:
        assert batch.input_ids is not None
        for source in (batch.input_ids, batch.mix_running_indices):
            context.streams.record(source, context.streams.forward)
        _append_running(context, batch, batch.mix_running_indices)
        batch.mix_running_indices = None
    elif batch.input_ids is None:
        batch.input_ids, batch.positions = decode_inputs(
            context.futures.output_tokens_buf,
            batch.req_pool_indices,
            batch.seq_lens,
            context.req_to_token,
            None if context.pages is context.req_to_token else context.pages,
            int(batch.seq_lens_cpu.max()),
        )


def _append_running(context: RelayContext, batch: ScheduleBatch, rows: torch.Tensor) -> None:
    assert batch.input_ids is not None
    batch.input_ids = torch.cat([batch.input_ids, context.futures.output_tokens_buf[rows]])


def publish_next_lengths(context: RelayContext, batch: ScheduleBatch) -> None:
    """Publish the length of each request's next step. Without speculation nothing reads it since #26020; it is kept as
    upstream's dead write."""
    context.futures.publish(batch.req_pool_indices, batch.seq_lens + 1)


def stash_by_row(context: RelayContext, future: FutureIndices, token_ids: torch.Tensor) -> None:
    context.futures.stash(future.indices, token_ids)


def drop_input(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """The relay holds the tokens; the batch carries no input between steps."""
    batch.input_ids = batch.positions = None


def mix_by_index(context: RelayContext, prefill: ScheduleBatch, running: ScheduleBatch) -> None:
    """Keep the rows whose tokens follow the prompt; ``resolve`` gathers the tokens."""
    prefill.mix_running_indices = running.req_pool_indices


def filter_input(context: RelayContext, batch: ScheduleBatch, keep: torch.Tensor) -> None:
    if batch.input_ids is not None:
        batch.input_ids = batch.input_ids[keep]


def join_if_any(context: RelayContext, batch: ScheduleBatch) -> bool:
    """A batch that has lost all its rows must not be merged: its tensors are stale."""
    return not batch.is_empty


def merge_input_two_sided(context: RelayContext, batch: ScheduleBatch, other: ScheduleBatch) -> None:
    """If one side has no ids, the merged batch has none, and every row is gathered from the relay (#25945)."""
    if batch.input_ids is not None and other.input_ids is not None:
        batch.input_ids = torch.cat([batch.input_ids, other.input_ids])
    else:
        batch.input_ids = None
