"""The cache of an engine without prefix sharing: only a chunked request's own earlier chunks are reused."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from .cache import MatchResult
from .slots import ReqToTokenPool
from .tokens import KVAllocator

if TYPE_CHECKING:
    from ..request import Request
    from .tree import TreeNode


class ChunkCache:
    """A ``PrefixCache`` that owns nothing: every slot in a row belongs to the request."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool_allocator: KVAllocator) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = token_to_kv_pool_allocator.page_size
        self._nothing = torch.empty(0, dtype=torch.int64, device=token_to_kv_pool_allocator.device)

    def match_prefix(self, tokens: array[int]) -> MatchResult:  # noqa: ARG002
        return MatchResult(self._nothing, None, 0)

    def cache_unfinished_req(self, req: Request) -> None:
        kv_indices = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.fill_len]
        req.prefix_indices = kv_indices.to(torch.int64, copy=True)

    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:  # noqa: ARG002
        kv_indices = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_committed_len]
        self.token_to_kv_pool_allocator.free(kv_indices)

    def inc_lock_ref(self, node: TreeNode | None) -> None: ...

    def dec_lock_ref(self, node: TreeNode | None) -> None: ...

    def evict(self, num_tokens: int) -> int:  # noqa: ARG002
        return 0

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def values(self) -> list[torch.Tensor]:
        return []
