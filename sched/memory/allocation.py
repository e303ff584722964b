"""Allocation of KV slots for a batch's new tokens: from the allocator, after evicting from the cache if it has too few;
and the release of a request's memory.

Allocation raises ``OutOfKVMemoryError`` if there are too few in both, which admission and retraction prevent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..request import Request
from .cache import PrefixCache
from .pools import Extents, PagedAllocator, pages_between


class OutOfKVMemoryError(RuntimeError):
    """The scheduler's plan needs more KV slots than there are."""


def evict_from_tree_cache(cache: PrefixCache, num_tokens: int) -> None:
    """If the allocator has fewer than ``num_tokens``, evict as many from the cache as possible."""
    if cache.token_to_kv_pool_allocator.available_size() < num_tokens:
        cache.evict(num_tokens)


def alloc_token_slots(cache: PrefixCache, num_tokens: int) -> torch.Tensor:
    """[num_tokens] int64."""
    evict_from_tree_cache(cache, num_tokens)
    return _granted(cache, cache.token_to_kv_pool_allocator.alloc(num_tokens), num_tokens)


def alloc_for_extend(
    cache: PrefixCache,
    prefix_tensors: Sequence[torch.Tensor],
    num_tokens: int,
    *,
    on_device: Extents,
    on_host: Extents,
) -> torch.Tensor:
    """Slots [num_tokens] int64 of the positions [start, end) of each request, one request after the other.
    ``prefix_tensors`` are b tensors [start]."""
    allocator = cache.token_to_kv_pool_allocator
    if not isinstance(allocator, PagedAllocator):
        return alloc_token_slots(cache, num_tokens)
    evict_from_tree_cache(cache, num_tokens + len(prefix_tensors) * allocator.page_size)
    last_loc = last_locations(prefix_tensors, allocator.device)
    slots = allocator.alloc_extend(last_loc, num_tokens, on_device=on_device, on_host=on_host)
    return _granted(cache, slots, num_tokens)


def alloc_for_decode(
    cache: PrefixCache, *, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
) -> torch.Tensor:
    """One slot [b] int64 per request, for position seq_len: the lengths do not count the new token yet."""
    allocator = cache.token_to_kv_pool_allocator
    num_reqs = req_pool_indices.shape[0]
    if not isinstance(allocator, PagedAllocator):
        return alloc_token_slots(cache, num_reqs)
    evict_from_tree_cache(cache, num_reqs * allocator.page_size)
    last_loc = cache.req_to_token_pool.req_to_token[req_pool_indices, seq_lens - 1]
    slots = allocator.alloc_decode(seq_lens_cpu=seq_lens_cpu + 1, seq_lens=seq_lens + 1, last_loc=last_loc)
    return _granted(cache, slots, num_reqs)


def alloc_ahead(
    cache: PrefixCache, req_pool_indices: torch.Tensor, *, on_device: Extents, on_host: Extents
) -> torch.Tensor:
    """Slots int64 of the positions [start, end) of each request, one request after the other."""
    allocator, num_tokens = cache.token_to_kv_pool_allocator, int((on_host[1] - on_host[0]).sum())
    if not isinstance(allocator, PagedAllocator):
        return alloc_token_slots(cache, num_tokens)
    evict_from_tree_cache(cache, pages_between(*on_host, cache.page_size) * cache.page_size)
    last_loc = cache.req_to_token_pool.req_to_token[req_pool_indices, on_device[0] - 1].to(torch.int64)
    slots = allocator.alloc_extend(last_loc, num_tokens, on_device=on_device, on_host=on_host)
    return _granted(cache, slots, num_tokens)


def claim_pages(cache: PrefixCache, num_pages: int) -> torch.Tensor:
    """Take pages whose slots a kernel assigns. Returns the list of free pages, of which the first ``num_pages`` are
    taken."""
    allocator = cache.token_to_kv_pool_allocator
    num_tokens = num_pages * allocator.page_size
    evict_from_tree_cache(cache, num_tokens)
    return _granted(cache, allocator.claim(num_pages), num_tokens)


def last_locations(prefix_tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[b] int64: the slot of each prefix's last token, -1 without prefix.

    Each -1 is a separate upload that waits for the stream, as upstream's is.
    """
    last = [
        prefix[-1:] if prefix.shape[0] else torch.tensor([-1], device=device) for prefix in prefix_tensors
    ]
    return torch.cat(last)


def _granted(cache: PrefixCache, slots: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    if slots is None:
        free = cache.token_to_kv_pool_allocator.available_size()
        raise OutOfKVMemoryError(
            f"{num_tokens} new tokens do not fit: {free} KV slots are free, "
            f"{cache.evictable_size()} evictable, {cache.protected_size()} in use by the cache"
        )
    return slots


def release_kv_cache(
    req: Request, cache: PrefixCache, *, is_insert: bool = True, speculative: bool = False
) -> None:
    """Give the committed KV to the cache (or free it), free the rest, and release the row.

    Afterwards the request holds no memory. Speculation allocates ahead::

        0 ........ kv_committed_len .. page end ........ kv_allocated_len
        |-- cached or freed -----------|------ freed ----------|
    """
    pool = cache.req_to_token_pool
    row = req.row
    assert speculative or req.kv_committed_len == req.kv_allocated_len, f"request {req.id} allocated ahead"
    cache.cache_finished_req(req, is_insert=is_insert)
    start = -(-req.kv_committed_len // cache.page_size) * cache.page_size
    if start < req.kv_allocated_len:
        cache.token_to_kv_pool_allocator.free(pool.req_to_token[row, start : req.kv_allocated_len])
    pool.free(row)
    req.req_pool_idx = req.prefix_indices = req.last_node = None
    req.cache_protected_len = req.kv_committed_len = req.kv_allocated_len = 0
