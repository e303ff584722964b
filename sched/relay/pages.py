"""Which page table a forward reads, and until when."""

from __future__ import annotations

import torch

from ..batch import ScheduleBatch
from ..kernels.placement import copy_pages
from .context import RelayContext


def shared_pages(req_to_token: torch.Tensor) -> torch.Tensor:
    """The schedule's own table, which must not change while a forward runs."""
    return req_to_token


def own_pages(req_to_token: torch.Tensor) -> torch.Tensor:
    """A table of the same size for the forward stream alone."""
    return torch.zeros_like(req_to_token)


def copy_tables(context: RelayContext, batch: ScheduleBatch) -> None:
    """Copy the batch's rows of the page table on the forward stream and record the event of the copy. The forward reads
    nothing else that the schedule may change."""
    if batch.spec_info is not None:
        copy_rows_ahead(context, batch)
    elif not batch.is_empty:
        longest = int(batch.seq_lens_cpu.max())
        copy_pages(context.pages, context.req_to_token, batch.req_pool_indices, batch.seq_lens, longest)
    mark_read(context, batch)


def copy_rows_ahead(context: RelayContext, batch: ScheduleBatch) -> None:
    """Copy the rows with all slots that a speculative step may write."""
    spec = context.config.speculative
    assert spec is not None
    lens = batch.seq_lens + spec.overhang
    copy_pages(context.pages, context.req_to_token, batch.req_pool_indices, lens, batch.longest)


def copy_prompt_tables(context: RelayContext, batch: ScheduleBatch) -> None:
    """As ``copy_tables``, unless ``resolve`` has copied the rows together with making positions."""
    if batch.positions is None:
        copy_tables(context, batch)
    else:
        mark_read(context, batch)


def mark_read(context: RelayContext, batch: ScheduleBatch) -> None:
    """Record the event behind which the forward reads nothing that the schedule may change."""
    if context.config.capabilities.events:
        context.read_done = context.streams.module.Event()
        context.read_done.record()
