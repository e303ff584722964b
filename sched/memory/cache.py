"""Prefix caches, and the release of a request's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import NamedTuple

import torch

from ..request import Request
from .pools import ReqToTokenPool
from .tokens import KVAllocator
from .tree import TreeNode


class MatchResult(NamedTuple):
    """``device_indices`` [matched] int64: the KV slots of the first ``matched`` tokens."""

    device_indices: torch.Tensor
    last_node: TreeNode | None
    matched: int


class PrefixCache(ABC):
    """Owns the KV of prefixes that requests share. Sizes are in tokens. The methods that are implemented here are those
    of a cache that owns nothing."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool_allocator: KVAllocator) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = token_to_kv_pool_allocator.page_size
        self._nothing = torch.empty(0, dtype=torch.int64, device=token_to_kv_pool_allocator.device)

    def match_prefix(self, tokens: array[int]) -> MatchResult:  # noqa: ARG002
        """The longest cached prefix of ``tokens``, in whole pages. Locks nothing."""
        return MatchResult(self._nothing, None, 0)

    @abstractmethod
    def cache_unfinished_req(self, req: Request) -> None:
        """Keep the KV of tokens [0, fill_len) and set the prefix that the next chunk or step starts from."""

    @abstractmethod
    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:
        """Keep (is_insert) or free the KV of tokens [0, kv_committed_len); unlock the request's node."""

    def inc_lock_ref(self, node: TreeNode | None) -> None:  # noqa: B027
        """Protect the path to ``node`` from eviction, once more."""

    def dec_lock_ref(self, node: TreeNode | None) -> None:  # noqa: B027
        """Take back one ``inc_lock_ref``."""

    def evict(self, num_tokens: int) -> int:  # noqa: ARG002
        """Free at least ``num_tokens`` unlocked tokens, least recently used first, as far as there are any. Returns how
        many were freed."""
        return 0

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def values(self) -> list[torch.Tensor]:
        """The slots that the cache owns, a tensor per node."""
        return []


class ChunkCache(PrefixCache):
    """The cache of an engine without prefix sharing: every slot in a row belongs to the request, and only a chunked
    request's own earlier chunks are reused."""

    def cache_unfinished_req(self, req: Request) -> None:
        kv_indices = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.fill_len]
        req.prefix_indices = kv_indices.to(torch.int64, copy=True)

    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:  # noqa: ARG002
        kv_indices = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_committed_len]
        self.token_to_kv_pool_allocator.free(kv_indices)


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
    _clear(req)


def _clear(req: Request) -> None:
    req.req_pool_idx = None
    req.prefix_indices = None
    req.last_node = None
    req.cache_protected_len = 0
    req.kv_committed_len = 0
    req.kv_allocated_len = 0
