"""Allocation of rows, KV slots and page-table entries of a batch's new tokens.

A ``split`` preparation is upstream's (``mem_cache/common``): a copy for each array and a small kernel for each part.
The uploads are separate on purpose: each is pinned and asynchronous, or pageable, as upstream's is. A ``fused``
preparation is one upload and one kernel. The overlapped speculative worker allocates slots ahead of a request's length.
"""

from __future__ import annotations

import numpy as np
import torch

from ..admission import allocation_end
from ..batch import ScheduleBatch
from ..kernels.allocation import place_decode, place_extend, upload_prefix_pointers, write_cache_indices
from ..kernels.arrays import one_more
from ..kernels.drafts import place_ahead, write_rows
from ..memory.allocation import alloc_ahead, alloc_for_decode, alloc_for_extend, claim_pages
from ..memory.pools import pages_between
from ..model.sampling import host_rows, packed_words
from .engine import Engine


def take_rows(engine: Engine, batch: ScheduleBatch) -> None:
    """Allocate a row for each request that has none: one that continues its prompt keeps its row."""
    new = [req for req in batch.reqs if req.req_pool_idx is None]
    rows = engine.slots.alloc(len(new))
    assert rows is not None, f"admission took {len(new)} requests for {engine.slots.available_size()} rows"
    for req, row in zip(new, rows, strict=True):
        req.req_pool_idx = row
    batch.req_pool_indices_cpu = torch.tensor([req.req_pool_idx for req in batch.reqs], dtype=torch.int64)


def split_prompts(engine: Engine, batch: ScheduleBatch) -> torch.Tensor | None:
    """Upload the lengths and rows of an extend batch, and allocate slots for the positions [prefix_len, seq_len) of
    each request. Returns None: the sampling parameters are not part of the upload."""
    device, pinned = engine.config.device, engine.pinned
    seq_lens = [req.fill_len for req in batch.reqs]
    batch.seq_lens = torch.tensor(seq_lens, dtype=torch.int64, pin_memory=pinned).to(
        device, non_blocking=True
    )
    batch.orig_seq_lens = torch.tensor(_orig_seq_lens(batch), dtype=torch.int32, pin_memory=pinned).to(
        device, non_blocking=True
    )
    prefix_tensors = [
        torch.empty(0, dtype=torch.int64) if req.prefix_indices is None else req.prefix_indices
        for req in batch.reqs
    ]
    prefix_lens_cpu = torch.tensor(batch.prefix_lens, dtype=torch.int64)
    extend_lens_cpu = torch.tensor(batch.extend_lens, dtype=torch.int64)
    prefix_lens = prefix_lens_cpu.to(device, non_blocking=True)
    extend_lens = extend_lens_cpu.to(device, non_blocking=True)
    batch.req_pool_indices = batch.req_pool_indices_cpu.to(device, non_blocking=True)
    batch.out_cache_loc = alloc_for_extend(
        engine.cache,
        prefix_tensors,
        batch.extend_num_tokens,
        on_device=(prefix_lens, batch.seq_lens),
        on_host=(prefix_lens_cpu, batch.seq_lens_cpu),
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


def split_tokens(engine: Engine, batch: ScheduleBatch) -> None:
    """Allocate one slot per request for position seq_len, then advance the lengths."""
    seq_lens = engine.relay.allocation_lengths(batch)
    batch.out_cache_loc = alloc_for_decode(
        engine.cache,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=seq_lens,
        seq_lens_cpu=batch.seq_lens_cpu,
    )
    positions = seq_lens.clone()
    engine.slots.req_to_token[batch.req_pool_indices, positions] = batch.out_cache_loc.to(torch.int32)
    engine.relay.advance(batch)


def _orig_seq_lens(batch: ScheduleBatch) -> list[int]:
    return [max(req.fill_len, len(req.origin_input_ids)) for req in batch.reqs]


def fused_prompts(engine: Engine, batch: ScheduleBatch) -> torch.Tensor | None:
    """As ``split_prompts``. Returns the sampling parameters [b, 6] int32 if they are part of the upload."""
    prefix_lens, words = _upload_fused(engine, batch)
    size = engine.config.page_size
    batch.out_cache_loc = place_extend(
        engine.slots.req_to_token,
        batch.req_pool_indices,
        _prefixes(engine, batch),
        prefix_lens,
        batch.seq_lens,
        claim_pages(engine.cache, _pages(batch, size)),
        size,
        batch.extend_num_tokens,
    )
    return words


def fused_tokens(engine: Engine, batch: ScheduleBatch) -> None:
    """As ``split_tokens``."""
    size = engine.config.page_size
    pages = batch.batch_size if size == 1 else int((batch.seq_lens_cpu % size == 0).sum())
    batch.out_cache_loc, batch.seq_lens, batch.orig_seq_lens = place_decode(
        engine.slots.req_to_token,
        batch.req_pool_indices,
        batch.seq_lens,
        batch.orig_seq_lens,
        claim_pages(engine.cache, pages),
        size,
    )
    batch.seq_lens_cpu = one_more(batch.seq_lens_cpu)


def _upload_fused(engine: Engine, batch: ScheduleBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lengths, rows and sampling parameters as one pinned copy::

        int32 words   |-- seq_lens, rows, prefix_lens: 6 b --|-- sampling: 6 b --|-- orig, extend, prefix: 3 b --|
                      |-- three int64 each ------------------|-- if packed ------|-- int32 ---------------------|

    Returns the prefix lengths [b] int64 and the sampling parameters.
    """
    b = batch.batch_size
    wide = np.stack([batch.seq_lens_cpu.numpy(), batch.req_pool_indices_cpu.numpy(), batch.prefix_lens])
    packs = engine.relay.row.sampling_tensors == "packed" and engine.pinned
    words = packed_words(host_rows(batch.reqs, engine.config)) if packs else np.empty(0, np.int32)
    narrow = np.array([_orig_seq_lens(batch), batch.extend_lens, batch.prefix_lens], np.int32)
    parts = [wide.astype(np.int64).view(np.int32), words, narrow]
    host = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
    device = (host.pin_memory() if engine.pinned else host).to(engine.config.device, non_blocking=True)
    batch.seq_lens, batch.req_pool_indices, prefix_lens = (
        device[: 6 * b].view(torch.int64).view(3, b).unbind()
    )
    rows = device[-3 * b :].view(3, b)
    batch.orig_seq_lens, batch.extend_rows = rows[0], rows[1:]
    return prefix_lens, device[6 * b : 12 * b].view(b, 6) if packs else None


def _pages(batch: ScheduleBatch, size: int) -> int:
    """The number of pages that the new tokens need."""
    if size == 1:
        return batch.extend_num_tokens
    held = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    return sum(-(-(prefix + extend) // size) - -(-prefix // size) for prefix, extend in held)


def _prefixes(engine: Engine, batch: ScheduleBatch) -> torch.Tensor:
    """Slots of all cached prefixes, one request after the other."""
    cached = [req.prefix_indices for req in batch.reqs if req.prefix_indices is not None and req.prefix_len]
    if len(cached) == 1:
        return cached[0]
    return torch.cat(cached) if cached else torch.empty(0, dtype=torch.int64, device=engine.config.device)


def prepare_ahead(engine: Engine, batch: ScheduleBatch) -> None:
    """Allocate slots up to two steps ahead for every request, and count the slot of its bonus token as committed."""
    assert engine.config.speculative is not None and engine.relay.drafts is not None
    engine.relay.drafts.prepare_lengths(batch)
    starts = torch.tensor([req.kv_allocated_len for req in batch.reqs], dtype=torch.int64)
    ends = torch.tensor(
        [allocation_end(req, engine.config.speculative) for req in batch.reqs], dtype=torch.int64
    )
    _PLACE_AHEAD[engine.relay.drafts.row.ends](engine, batch, starts, ends)
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
    first, last = starts.to(device), ends.to(device)
    write_rows(engine.slots.req_to_token, batch.req_pool_indices, first, last - first, slots)


def _place_asynchronous(
    engine: Engine, batch: ScheduleBatch, starts: torch.Tensor, ends: torch.Tensor
) -> None:
    device = engine.config.device
    first, last = starts.to(device, non_blocking=True), ends.to(device, non_blocking=True)
    slots = alloc_ahead(engine.cache, batch.req_pool_indices, on_device=(first, last), on_host=(starts, ends))
    write_rows(engine.slots.req_to_token, batch.req_pool_indices, first, last - first, slots)


def _place_packed(engine: Engine, batch: ScheduleBatch, starts: torch.Tensor, ends: torch.Tensor) -> None:
    """One pinned copy and one kernel."""
    host = torch.stack([starts, ends])
    device = (host.pin_memory() if engine.pinned else host).to(engine.config.device, non_blocking=True)
    size, table = engine.config.page_size, engine.slots.req_to_token
    first, last = device[0], device[1]
    pages = claim_pages(engine.cache, pages_between(starts, ends, size))
    count = int((ends - starts).sum())
    place_ahead(table.view(-1), batch.req_pool_indices, first, last, pages, size, count, table.shape[1])


_PLACE_AHEAD = {"blocking": _place_blocking, "asynchronous": _place_asynchronous, "packed": _place_packed}
