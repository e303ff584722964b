"""Allocation of KV slots ahead of a request's length, for the overlapped speculative worker."""

from __future__ import annotations

import torch

from ..admission.budget import allocation_end
from ..batch import ScheduleBatch
from ..kernels.drafts import place_ahead, write_rows
from ..memory.allocation import alloc_ahead, claim_pages, pages_between
from .engine import Engine


def prepare_ahead(engine: Engine, batch: ScheduleBatch) -> None:
    """Allocate slots up to two steps ahead for every request, and count the slot of its bonus token as committed."""
    assert engine.config.speculative is not None and engine.relay.drafts is not None
    engine.relay.drafts.prepare_lengths(batch)
    starts = torch.tensor([req.kv_allocated_len for req in batch.reqs], dtype=torch.int64)
    ends = torch.tensor(
        [allocation_end(req, engine.config.speculative) for req in batch.reqs], dtype=torch.int64
    )
    _PLACE[engine.relay.drafts.row.ends](engine, batch, starts, ends)
    for req, end in zip(batch.reqs, ends.tolist(), strict=True):
        req.kv_allocated_len = end
        req.kv_committed_len += 1
    batch.longest = int(ends.max())


def _place_blocking(engine: Engine, batch: ScheduleBatch, starts: torch.Tensor, ends: torch.Tensor) -> None:
    """As upstream until #26380: with pages the lengths are uploaded twice, once to allocate and once to write."""
    device = engine.config.device
    first, last = starts, ends
    if engine.config.page_size > 1:
        first, last = starts.to(device), ends.to(device)
    slots = alloc_ahead(engine.cache, batch.req_pool_indices, on_device=(first, last), on_host=(starts, ends))
    device_starts, device_ends = starts.to(device), ends.to(device)
    _write(engine, batch, device_starts, device_ends, slots)


def _place_asynchronous(
    engine: Engine, batch: ScheduleBatch, starts: torch.Tensor, ends: torch.Tensor
) -> None:
    device = engine.config.device
    device_starts, device_ends = starts.to(device, non_blocking=True), ends.to(device, non_blocking=True)
    on_device = device_starts, device_ends
    slots = alloc_ahead(engine.cache, batch.req_pool_indices, on_device=on_device, on_host=(starts, ends))
    _write(engine, batch, device_starts, device_ends, slots)


def _place_packed(engine: Engine, batch: ScheduleBatch, starts: torch.Tensor, ends: torch.Tensor) -> None:
    """One pinned copy and one kernel."""
    host = torch.stack([starts, ends])
    device = (host.pin_memory() if engine.pinned else host).to(engine.config.device, non_blocking=True)
    size = engine.config.page_size
    place_ahead(
        engine.slots.req_to_token,
        batch.req_pool_indices,
        (device[0], device[1]),
        claim_pages(engine.cache, pages_between(starts, ends, size)),
        size,
        int((ends - starts).sum()),
    )


_PLACE = {"blocking": _place_blocking, "asynchronous": _place_asynchronous, "packed": _place_packed}


def _write(
    engine: Engine, batch: ScheduleBatch, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor
) -> None:
    write_rows(engine.slots.req_to_token, batch.req_pool_indices, starts, ends - starts, slots)
