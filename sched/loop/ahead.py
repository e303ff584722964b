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
    slots = _allocate(engine, batch, (starts, ends), (first, last))
    device_starts, device_ends = starts.to(device), ends.to(device)
    _write(engine, batch, device_starts, device_ends, slots)


def _place_asynchronous(
    engine: Engine, batch: ScheduleBatch, starts: torch.Tensor, ends: torch.Tensor
) -> None:
    device = engine.config.device
    device_starts, device_ends = starts.to(device, non_blocking=True), ends.to(device, non_blocking=True)
    slots = _allocate(engine, batch, (starts, ends), (device_starts, device_ends))
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


def _allocate(
    engine: Engine,
    batch: ScheduleBatch,
    host: tuple[torch.Tensor, torch.Tensor],
    device: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    return alloc_ahead(
        engine.cache,
        req_pool_indices=batch.req_pool_indices,
        starts=device[0],
        ends=device[1],
        starts_cpu=host[0],
        ends_cpu=host[1],
    )


def _write(
    engine: Engine, batch: ScheduleBatch, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor
) -> None:
    write_rows(engine.slots.req_to_token, batch.req_pool_indices, starts, ends - starts, slots)
