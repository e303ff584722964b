"""Checks that every KV slot is in exactly one place: by host integers after every step, by device values on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ..request import Request
from .cache import PrefixCache

Peek = Callable[[torch.Tensor], torch.Tensor]


class MemoryInvariantError(RuntimeError):
    """A slot is owned by nothing, or owned twice."""


class MemoryStatistics(NamedTuple):
    """The owners of the KV slots, in tokens; the parts sum to ``total`` outside free groups."""

    free: int
    evictable: int
    protected: int
    owned: int  # by requests alone, whole pages
    total: int

    @property
    def lost(self) -> int:
        """0; positive after a leak, negative when something is owned twice."""
        return self.total - self.free - self.evictable - self.protected - self.owned


def statistics(cache: PrefixCache, requests: Iterable[Request]) -> MemoryStatistics:
    """``requests`` are all requests that hold a row. Reads no device value."""
    allocator, page = cache.token_to_kv_pool_allocator, cache.page_size
    return MemoryStatistics(
        free=allocator.available_size(),
        evictable=cache.evictable_size(),
        protected=cache.protected_size(),
        owned=sum(-(-req.kv_allocated_len // page) * page - req.cache_protected_len for req in requests),
        total=allocator.size,
    )


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def check(cache: PrefixCache, requests: Sequence[Request], *, peek: Peek = unchanged) -> None:
    """Raise MemoryInvariantError unless every page and row is in exactly one place. Waits for the device unless
    ``peek`` reads its tensors without waiting."""
    pool = cache.req_to_token_pool
    held = [req.req_pool_idx for req in requests if req.req_pool_idx is not None]
    check_once("row", [*pool.free_slots, *held], pool.size)
    allocator, table = cache.token_to_kv_pool_allocator, peek(pool.req_to_token)
    owned = [peek(value) for value in cache.values()]
    owned += [table[req.req_pool_idx][req.cache_protected_len : req.kv_allocated_len] for req in requests]
    pages: list[int] = peek(allocator.free_pages).tolist()
    for slots in owned:
        pages += torch.unique(slots // cache.page_size).tolist()
    check_once("page", pages, allocator.size // cache.page_size)
    lost = statistics(cache, requests).lost
    if lost:
        raise MemoryInvariantError(f"{lost} tokens of KV are unaccounted for")


def check_once(what: str, found: Sequence[int], total: int) -> None:
    """Raise MemoryInvariantError unless ``found`` contains each of 1..``total`` once."""
    if sorted(found) == list(range(1, total + 1)):
        return
    counts, expected = Counter(found), set(range(1, total + 1))
    twice = sorted(item for item, count in counts.items() if count > 1)
    missing, strange = sorted(expected - counts.keys()), sorted(counts.keys() - expected)
    raise MemoryInvariantError(f"{what}s owned twice: {twice}, lost: {missing}, out of range: {strange}")
