"""Allocation of rows, KV slots and page-table entries of a batch's new tokens as upstream does it
(``mem_cache/common``): a copy for each array and a small kernel for each part.

The uploads are separate on purpose: each is pinned and asynchronous, or pageable, as upstream's is.
"""

from __future__ import annotations

import torch

from ..batch import ScheduleBatch
from ..kernels.allocation import upload_prefix_pointers, write_cache_indices
from ..memory import allocation
from .engine import Engine


def take_rows(engine: Engine, batch: ScheduleBatch) -> None:
    """Allocate a row for each request that has none: one that continues its prompt keeps its row."""
    new = [req for req in batch.reqs if req.req_pool_idx is None]
    rows = engine.slots.alloc(len(new))
    assert rows is not None, f"admission took {len(new)} requests for {engine.slots.available_size()} rows"
    for req, row in zip(new, rows, strict=True):
        req.req_pool_idx = row
    batch.req_pool_indices_cpu = torch.tensor([req.req_pool_idx for req in batch.reqs], dtype=torch.int64)


def place_prompts(engine: Engine, batch: ScheduleBatch) -> torch.Tensor | None:
    """Upload the lengths and rows of an extend batch, and allocate slots for the positions [prefix_len, seq_len) of
    each request. Returns None: the sampling parameters are not part of the upload."""
    _upload_lengths(engine, batch)
    device = engine.config.device
    prefix_tensors = [_prefix_of(req.prefix_indices) for req in batch.reqs]
    prefix_lens_cpu = torch.tensor(batch.prefix_lens, dtype=torch.int64)
    extend_lens_cpu = torch.tensor(batch.extend_lens, dtype=torch.int64)
    prefix_lens = prefix_lens_cpu.to(device, non_blocking=True)
    extend_lens = extend_lens_cpu.to(device, non_blocking=True)
    batch.req_pool_indices = batch.req_pool_indices_cpu.to(device, non_blocking=True)
    batch.out_cache_loc = allocation.alloc_for_extend(
        engine.cache,
        prefix_tensors=prefix_tensors,
        prefix_lens_cpu=prefix_lens_cpu,
        seq_lens_cpu=batch.seq_lens_cpu,
        prefix_lens=prefix_lens,
        seq_lens=batch.seq_lens,
        extend_num_tokens=batch.extend_num_tokens,
    )
    write_cache_indices(
        engine.slots.req_to_token,
        batch.req_pool_indices,
        prefix_tensors=prefix_tensors,
        prefix_pointers=upload_prefix_pointers(prefix_tensors, device),
        prefix_lens=prefix_lens,
        seq_lens=batch.seq_lens,
        extend_lens=extend_lens,
        out_cache_loc=batch.out_cache_loc,
    )
    return None


def place_tokens(engine: Engine, batch: ScheduleBatch) -> None:
    """Allocate one slot per request for position seq_len, then advance the lengths."""
    seq_lens = engine.relay.allocation_lengths(batch)
    batch.out_cache_loc = allocation.alloc_for_decode(
        engine.cache,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=seq_lens,
        seq_lens_cpu=batch.seq_lens_cpu,
    )
    positions = seq_lens.clone()
    engine.slots.req_to_token[batch.req_pool_indices, positions] = batch.out_cache_loc.to(torch.int32)
    engine.relay.advance(batch)


def _prefix_of(indices: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64) if indices is None else indices


def orig_seq_lens(batch: ScheduleBatch) -> list[int]:
    return [max(req.fill_len, len(req.origin_input_ids)) for req in batch.reqs]


def _upload_lengths(engine: Engine, batch: ScheduleBatch) -> None:
    device, pinned = engine.config.device, engine.pinned
    seq_lens = [req.fill_len for req in batch.reqs]
    batch.seq_lens = torch.tensor(seq_lens, dtype=torch.int64, pin_memory=pinned).to(
        device, non_blocking=True
    )
    batch.orig_seq_lens = torch.tensor(orig_seq_lens(batch), dtype=torch.int32, pin_memory=pinned).to(
        device, non_blocking=True
    )
