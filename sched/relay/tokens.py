"""How token ids get to a forward: a prompt's from the host, and sampled tokens from the step before, also when rows
leave or join."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from ..batch import FutureIndices, ScheduleBatch, StepResult
from ..kernels import allocation, arrays
from ..kernels import rows as row_kernels
from .context import RelayContext

Parts = Sequence["array[int]"]

# ---- a prompt's ids ---------------------------------------------------------------------------------------------


def flatten_list(context: RelayContext, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
    """Build a Python list of all tokens (before #25098)."""
    with context.observer.range("flatten", batch.step, batch.extend_num_tokens):
        return torch.tensor([token for part in parts for token in part], dtype=torch.int64)


def flatten_numpy(context: RelayContext, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
    """Concatenate int64 buffers (#25098). The views of the parts are freed on return: an array with a live view cannot
    grow."""
    with context.observer.range("flatten_numpy", batch.step, batch.extend_num_tokens):
        return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=np.int64) for part in parts]))


def pinned(context: RelayContext, flat: torch.Tensor) -> torch.Tensor:
    """Stage in a fresh pinned block, which torch does not reuse before its copy has run."""
    return flat.pin_memory() if context.pinned else flat


def pageable(context: RelayContext, flat: torch.Tensor) -> torch.Tensor:
    return flat


def upload_now(context: RelayContext, batch: ScheduleBatch, staged: torch.Tensor) -> None:
    """Copy at once on the schedule stream, beside the previous forward unless a barrier orders the two."""
    batch.input_ids = staged.to(context.device, non_blocking=True)


def keep_staged(context: RelayContext, batch: ScheduleBatch, staged: torch.Tensor) -> None:
    """Leave the copy to the forward stream (#25945)."""
    batch.prefill_input_ids_cpu = staged


# ---- the bridge before #25945: between steps a batch carries placeholders, the negated indices of the buffer in which
# the tokens will be, and a kernel replaces them; in the serial loop it carries the tokens themselves


def open_ring(context: RelayContext, batch: ScheduleBatch) -> FutureIndices:
    """Take the step's slots, whose numbers a kernel of the schedule stream writes."""
    with context.observer.range("open", batch.step, batch.batch_size):
        return context.futures.take(batch.req_pool_indices)


def stash_interval(context: RelayContext, future: FutureIndices, token_ids: torch.Tensor) -> None:
    """A plain copy, since the ring's slots of a step are consecutive."""
    if future.indices.shape[0]:
        context.futures.output_tokens_buf[future.interval] = token_ids


def stash_nothing(context: RelayContext, future: FutureIndices, token_ids: torch.Tensor) -> None:
    """The serial loop has no relay before #25945."""


def resolve_placeholders(context: RelayContext, batch: ScheduleBatch) -> None:
    """Replace placeholders in place among all input ids, those of prompts included."""
    assert batch.input_ids is not None
    if batch.input_ids.shape[0]:
        row_kernels.resolve_negative(batch.input_ids, context.futures.output_tokens_buf)


def resolve_lengths_too(context: RelayContext, batch: ScheduleBatch) -> None:
    """Gather a decode's lengths from the last forward, too (#25944). Lengths come first, since both fields may be one
    tensor and the ids are resolved in place."""
    if batch.forward_mode.is_decode:
        batch.seq_lens = context.futures.new_seq_lens_buf[batch.req_pool_indices]
        row_kernels.assert_all((batch.seq_lens > 0).all())
    resolve_placeholders(context, batch)


def cast_output(context: RelayContext, batch: ScheduleBatch) -> None:
    """The bridge is a field of its own (before #25774)."""
    assert batch.output_ids is not None
    batch.input_ids = batch.output_ids.to(torch.int64)
    batch.output_ids = None


def conclude_output(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    batch.output_ids = _placeholders(context, batch, result)


def conclude_input(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    batch.input_ids = _placeholders(context, batch, result)


def conclude_both(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Ids and lengths become the same sentinel tensor (#25944)."""
    batch.input_ids = batch.seq_lens = _placeholders(context, batch, result)


def conclude_output_ids(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Serial loop: keep the tokens as the sampler returned them."""
    batch.output_ids = result.next_token_ids


def conclude_input_ids(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Serial loop: keep the tokens as the next input (#25774)."""
    assert result.next_token_ids is not None
    batch.input_ids = result.next_token_ids.to(torch.int64)


def keep_list(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Serial loop: put a list of tensors where the tokens belong (before #25774). Nothing reads it: the requests stay
    staged."""
    batch.output_ids = cast(Any, result.block_tokens)


def leave_list(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """A list of tensors is no bridge to a next step (#25774)."""


def _placeholders(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> torch.Tensor:
    with context.observer.range("conclude", batch.step, batch.batch_size):
        return -result.future_indices.indices


def mix_once(context: RelayContext, prefill: ScheduleBatch, running: ScheduleBatch) -> None:
    """Append the running requests' ids to the prompt, on the schedule stream."""
    assert prefill.input_ids is not None and running.input_ids is not None
    prefill.input_ids = torch.cat([prefill.input_ids, running.input_ids])


def mix_twice(context: RelayContext, prefill: ScheduleBatch, running: ScheduleBatch) -> None:
    """As ``mix_once``. Since #25774 merging makes the same tensor once more, which is dropped."""
    assert prefill.input_ids is not None and running.input_ids is not None
    mixed = torch.cat([prefill.input_ids, running.input_ids])
    merge_input_one_sided(context, prefill, running)
    prefill.input_ids = mixed


def mix_restoring_lengths(context: RelayContext, prefill: ScheduleBatch, running: ScheduleBatch) -> None:
    """Upload the running requests' lengths, since a mixed step's lengths are not resolved (#25944)."""
    running.seq_lens = running.seq_lens_cpu.to(context.device, non_blocking=True)
    mix_twice(context, prefill, running)


def filter_output_summing(context: RelayContext, batch: ScheduleBatch, keep: torch.Tensor) -> None:
    if batch.output_ids is not None:
        batch.output_ids = batch.output_ids[keep]
    _sum_lengths(batch)


def filter_input_summing(context: RelayContext, batch: ScheduleBatch, keep: torch.Tensor) -> None:
    if batch.input_ids is not None:
        batch.input_ids = batch.input_ids[keep]
    _sum_lengths(batch)


def _sum_lengths(batch: ScheduleBatch) -> None:
    """Read the sum of the lengths back, as upstream does whenever rows leave (before #25818)."""
    batch.seq_lens.sum().item()


def merge_output_one_sided(context: RelayContext, batch: ScheduleBatch, other: ScheduleBatch) -> None:
    """Raises TypeError if the other side has no tokens; if the own side has none, the other's are lost."""
    if batch.output_ids is not None:
        batch.output_ids = _joined(batch.output_ids, other.output_ids)


def merge_input_one_sided(context: RelayContext, batch: ScheduleBatch, other: ScheduleBatch) -> None:
    """As ``merge_output_one_sided`` for ``input_ids``, which replaced that field (#25774)."""
    if batch.input_ids is not None:
        batch.input_ids = _joined(batch.input_ids, other.input_ids)


def _joined(own: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    if other is None:
        raise TypeError("the side that joins carries no token ids")
    return torch.cat([own, other])


# ---- sampled tokens by request slot, from #25862 on -------------------------------------------------------------


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
        batch.input_ids, batch.positions = allocation.decode_inputs(
            context.futures.output_tokens_buf,
            batch.req_pool_indices,
            batch.seq_lens,
            context.req_to_token,
            None if context.pages is context.req_to_token else context.pages,
            arrays.largest(batch.seq_lens_cpu),
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
