"""The interface of a prefix cache."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from .slots import ReqToTokenPool
from .tokens import KVAllocator

if TYPE_CHECKING:
    from ..request import Request
    from .tree import TreeNode


class MatchResult(NamedTuple):
    """``device_indices`` [matched] int64: the KV slots of the first ``matched`` tokens."""

    device_indices: torch.Tensor
    last_node: TreeNode | None
    matched: int


class PrefixCache(Protocol):
    """Owns the KV of prefixes that requests share. Sizes are in tokens."""

    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: KVAllocator
    page_size: int

    def match_prefix(self, tokens: array[int]) -> MatchResult:
        """The longest cached prefix of ``tokens``, in whole pages. Locks nothing."""

    def cache_unfinished_req(self, req: Request) -> None:
        """Keep the KV of tokens [0, fill_len) and set the prefix that the next chunk or step starts from."""

    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:
        """Keep (is_insert) or free the KV of tokens [0, kv_committed_len); unlock the request's node."""

    def inc_lock_ref(self, node: TreeNode | None) -> None:
        """Protect the path to ``node`` from eviction, once more."""

    def dec_lock_ref(self, node: TreeNode | None) -> None: ...

    def evict(self, num_tokens: int) -> int:
        """Free at least ``num_tokens`` unlocked tokens, least recently used first, as far as there are any.

        Returns how many were freed.
        """

    def evictable_size(self) -> int: ...

    def protected_size(self) -> int: ...

    def values(self) -> list[torch.Tensor]:
        """The slots that the cache owns, a tensor per node."""
