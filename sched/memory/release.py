"""Releasing the memory of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..request import Request
    from .cache import PrefixCache


def release_kv_cache(
    req: Request, cache: PrefixCache, *, is_insert: bool = True, speculative: bool = False
) -> None:
    """Give the committed KV to the cache (or free it), free the rest, and release the row.

    Afterwards the request holds no memory. Speculation allocates ahead::

        0 ........ kv_committed_len .. page end ........ kv_allocated_len
        |-- cached or freed -----------|------ freed ----------|
    """
    pool = cache.req_to_token_pool
    row = req.req_pool_idx
    assert row is not None, f"request {req.id} holds no row"
    assert speculative or req.kv_committed_len == req.kv_allocated_len, f"request {req.id} allocated ahead"
    cache.cache_finished_req(req, is_insert=is_insert)
    start = -(-req.kv_committed_len // cache.page_size) * cache.page_size
    if start < req.kv_allocated_len:
        cache.token_to_kv_pool_allocator.free(pool.req_to_token[row, start : req.kv_allocated_len])
    pool.free(row)
    _clear(req)


def _clear(req: Request) -> None:
    req.req_pool_idx = None
    req.prefix_indices = None
    req.last_node = None
    req.cache_protected_len = 0
    req.kv_committed_len = 0
    req.kv_allocated_len = 0
