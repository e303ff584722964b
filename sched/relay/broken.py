"""Wrong policies that upstream had, released or in review. Only faults put them into a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from ..batch import FutureIndices, ScheduleBatch, StepResult
from ..config import EngineConfig
from ..kernels import rows as row_kernels
from . import drafts, ordering, tokens
from .context import FutureMap, FutureRing, RelayContext


def ringed_without_chunks(config: EngineConfig) -> FutureMap:
    """A limit of three steps for each request, however many chunks its prompt takes."""
    most = config.max_running_requests
    return FutureRing(3 * most, most=most, device=config.device)


def await_nothing(context: RelayContext, arrived: torch.Event) -> None:
    """Do not wait."""


def one_pinned_buffer() -> Callable[[RelayContext, torch.Tensor], torch.Tensor]:
    """A staging policy with one pinned block for all steps; a longer prompt gets a longer one."""
    block = torch.empty(0, dtype=torch.int64)

    def refilled(context: RelayContext, flat: torch.Tensor) -> torch.Tensor:
        """Refill the block whether or not the last copy from it has run."""
        nonlocal block
        if not context.pinned:
            return flat
        if block.shape[0] < flat.shape[0]:
            block = torch.empty(flat.shape[0], dtype=torch.int64, pin_memory=True)
        return block[: flat.shape[0]].copy_(flat)

    return refilled


def without_mirror(
    bootstrap: Callable[[RelayContext, ScheduleBatch], None],
) -> Callable[[RelayContext, ScheduleBatch], None]:
    """``bootstrap`` without the host mirror of the rows."""

    def unmirrored(context: RelayContext, batch: ScheduleBatch) -> None:
        bootstrap(context, batch)
        batch.unset("req_pool_indices_cpu")

    return unmirrored


def resolve_ids_first(context: RelayContext, batch: ScheduleBatch) -> None:
    """Look lengths up by their sentinel after the ids, which may be the same tensor, were resolved in place."""
    tokens.resolve_placeholders(context, batch)
    if batch.forward_mode.is_decode:
        batch.seq_lens = context.futures.new_seq_lens_buf[-batch.seq_lens]
        row_kernels.assert_all((batch.seq_lens > 0).all())


def resolve_with_sentinels(context: RelayContext, batch: ScheduleBatch) -> None:
    """Resolve negative ids as placeholders, though the batch carries none any more."""
    tokens.resolve_late(context, batch)
    tokens.resolve_placeholders(context, batch)


def keep_decoded(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Serial loop: keep a decode's tokens as the next input, as speculation v1 does; a prompt's stay in the relay."""
    assert result.next_token_ids is not None
    batch.input_ids = result.next_token_ids.to(torch.int64) if batch.forward_mode.is_decode else None


def stash_later(context: RelayContext, future: FutureIndices, token_ids: torch.Tensor) -> None:
    """Do nothing: ``stash_at_launch`` stashes."""


def stash_at_launch(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Stash the tokens of the launch's result, whether or not they have been sampled."""
    token_ids, future = result.next_token_ids, result.future_indices
    assert future is not None
    assert token_ids is not None, f"step {batch.step} is stashed before it was sampled"
    tokens.stash_by_row(context, future, token_ids)
    ordering.keep_in_ring(context, batch, result)


def keep_one_launch(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Hold the last launch only, while the one before may still run."""
    del context.kept_alive[1:]
    ordering.keep_in_ring(context, batch, result)


def join_always(context: RelayContext, batch: ScheduleBatch) -> bool:
    """Join even a batch that has lost all its requests and whose tensors are stale."""
    return True


def bridge_list(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Serial loop: keep the results as the next input, whether or not they are one tensor."""
    tokens.conclude_input_ids(context, batch, replace(result, next_token_ids=cast(Any, result.block_tokens)))


def stash_accepted(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Stash by row, as if every request had one token."""
    assert result.next_token_ids is not None
    context.futures.stash(batch.req_pool_indices, result.next_token_ids)
    drafts.conclude_in_input_ids(context, batch, result)


def filter_host_lengths(context: RelayContext, batch: ScheduleBatch, rows: torch.Tensor, before: int) -> None:
    """Filter host lengths like all other rows, whether or not they are set."""
    drafts.filter_future(context, batch, rows, before)
    batch.seq_lens_cpu = batch.seq_lens_cpu[rows.cpu()]


def keep_no_lengths(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Hold the batch but not the tensors that its worker reads, which the batch may drop before the forward has run."""
    result.extra_keep_alive_refs.clear()
    context.launches += 1
    context.kept_alive[context.launches % len(context.kept_alive)] = [batch, result.future_indices]


def wait_for_schedule_alone(context: RelayContext, transfer: Any) -> None:
    """Make a transfer wait for the schedule alone, while a forward may still use the pages that it overwrites."""
    context.streams.wait(transfer, context.streams.schedule)


def at_once(context: RelayContext, gone: Any) -> bool:
    """Free the pages as soon as sending was requested."""
    return True
