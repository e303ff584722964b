"""The bridge before #25945. Between steps the batch carries placeholders, the negated indices of the buffer in which
the tokens will be, and a kernel replaces them; in the serial loop it carries the tokens themselves."""

from __future__ import annotations

from typing import Any, cast

import torch

from ..batch import FutureIndices, ScheduleBatch, StepResult
from ..kernels.rows import assert_all, resolve_negative
from .context import RelayContext


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
        resolve_negative(batch.input_ids, context.futures.output_tokens_buf)


def resolve_lengths_too(context: RelayContext, batch: ScheduleBatch) -> None:
    """Gather a decode's lengths from the last forward, too (#25944). Lengths come first, since both fields may be one
    tensor and the ids are resolved in place."""
    if batch.forward_mode.is_decode:
        batch.seq_lens = context.futures.new_seq_lens_buf[batch.req_pool_indices]
        assert_all((batch.seq_lens > 0).all())
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
