"""Prefix caches: one that shares nothing, and one that keeps the KV of requests in a radix tree, from which other
requests start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..request import Request
from .pools import KVAllocator, ReqToTokenPool
from .tree import RadixTree, TreeNode, part


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


class RadixCache(PrefixCache):
    """A cache over a radix tree.

    The owners of the KV slots in a request's row::

        0 ....... cache_protected_len ....... fill_len / kv_committed_len
        |---- the tree ----|---- the request -----------|
    """

    def __init__(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool_allocator: KVAllocator) -> None:
        super().__init__(req_to_token_pool, token_to_kv_pool_allocator)
        self.tree = RadixTree(self.page_size)

    def match_prefix(self, tokens: array[int]) -> MatchResult:
        return self._matched(self.tree.match(tokens))

    def _matched(self, path: Sequence[TreeNode]) -> MatchResult:
        if not path:
            return MatchResult(self._nothing, self.tree.root, 0)
        device_indices = torch.cat([node.value for node in path])
        return MatchResult(device_indices, path[-1], device_indices.shape[0])

    def cache_unfinished_req(self, req: Request) -> None:
        tokens = req.tokens(0, req.fill_len)
        kv_indices = self._slots(req, len(tokens))
        aligned = self._aligned(len(tokens))
        present, path = self.tree.insert(tokens, part(kv_indices, 0, aligned).to(torch.int64))
        self.token_to_kv_pool_allocator.free(part(kv_indices, req.cache_protected_len, present))
        match = self._matched(path)
        kv_indices[req.cache_protected_len : aligned] = part(
            match.device_indices, req.cache_protected_len, match.matched
        )
        req.cache_protected_len = aligned
        self.dec_lock_ref(req.last_node)
        self.inc_lock_ref(match.last_node)
        req.last_node = match.last_node
        req.prefix_indices = match.device_indices
        if aligned < len(tokens):
            req.prefix_indices = torch.cat((match.device_indices, kv_indices[aligned:]))

    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:
        committed = req.kv_committed_len
        kv_indices = self._slots(req, committed)
        kept_from = aligned = self._aligned(committed)
        if is_insert:
            tokens = req.tokens(0, committed)
            assert len(tokens) == committed, f"request {req.id} committed KV of unknown tokens"
            kept_from = self.tree.insert(tokens, part(kv_indices, 0, aligned).to(torch.int64)).present
        own_from = min(req.cache_protected_len, kept_from)  # without an insert, the tree may have more
        self.token_to_kv_pool_allocator.free(part(kv_indices, own_from, kept_from))
        self.token_to_kv_pool_allocator.free(part(kv_indices, aligned, committed))
        self.dec_lock_ref(req.last_node)

    def inc_lock_ref(self, node: TreeNode | None) -> None:
        self.tree.lock(node)

    def dec_lock_ref(self, node: TreeNode | None) -> None:
        self.tree.unlock(node)

    def evict(self, num_tokens: int) -> int:
        dropped = self.tree.evict(num_tokens)
        for value in dropped:
            self.token_to_kv_pool_allocator.free(value)
        return sum(value.shape[0] for value in dropped)

    def evictable_size(self) -> int:
        return self.tree.evictable_size

    def protected_size(self) -> int:
        return self.tree.protected_size

    def values(self) -> list[torch.Tensor]:
        return [node.value for node in self.tree.nodes()]

    def _slots(self, req: Request, count: int) -> torch.Tensor:
        """[count] int32: the first slots of the request's row."""
        return part(self.req_to_token_pool.req_to_token.select(0, req.row), 0, count)

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size
