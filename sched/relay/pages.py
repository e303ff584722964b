"""Which page table a forward reads, and until when: ``pages``, ``read_tables``."""

from __future__ import annotations

import torch

from ..batch import ScheduleBatch
from ..kernels.placement import copy_pages
from .desk import Desk


def shared_pages(req_to_token: torch.Tensor) -> torch.Tensor:
    """The schedule's own table: it must not change while a forward runs."""
    return req_to_token


def own_pages(req_to_token: torch.Tensor) -> torch.Tensor:
    """A table of the forward stream's own, as large."""
    return torch.zeros_like(req_to_token)


def copy_tables(desk: Desk, batch: ScheduleBatch) -> None:
    """On the forward stream: copy the batch's rows of the page table, which is all that the schedule may change, and
    mark where that was done."""
    if batch.spec_info is not None:
        copy_rows_ahead(desk, batch)
    elif not batch.is_empty:
        assert batch.seq_lens_cpu is not None
        longest = int(batch.seq_lens_cpu.max())
        copy_pages(desk.pages, desk.req_to_token, batch.req_pool_indices, batch.seq_lens, longest)
    mark_read(desk, batch)


def copy_rows_ahead(desk: Desk, batch: ScheduleBatch) -> None:
    """Rows with all slots that a speculative step may write."""
    spec = desk.config.speculative
    assert spec is not None and batch.seq_lens is not None
    lens = batch.seq_lens + spec.overhang
    copy_pages(desk.pages, desk.req_to_token, batch.req_pool_indices, lens, batch.longest)


def copy_prompt_tables(desk: Desk, batch: ScheduleBatch) -> None:
    """As ``copy_tables``, unless ``resolve`` has copied the rows while it made positions."""
    if batch.positions is None:
        copy_tables(desk, batch)
    else:
        mark_read(desk, batch)


def mark_read(desk: Desk, batch: ScheduleBatch) -> None:  # noqa: ARG001
    """From here on the forward reads nothing that the schedule may change."""
    if desk.config.capabilities.events:
        desk.read_done = desk.streams.module.Event()
        desk.read_done.record()
