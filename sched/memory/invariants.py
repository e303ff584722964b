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
    allocator = cache.token_to_kv_pool_allocator
    return MemoryStatistics(
        free=allocator.available_size(),
        evictable=cache.evictable_size(),
        protected=cache.protected_size(),
        owned=sum(_owned_end(req, cache.page_size) - req.cache_protected_len for req in requests),
        total=allocator.size,
    )


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def check(cache: PrefixCache, requests: Sequence[Request], *, peek: Peek = unchanged) -> None:
    """Raise MemoryInvariantError unless every page and row is in exactly one place. Waits for the device unless
    ``peek`` reads its tensors without waiting."""
    check_once("row", _rows(cache, requests), cache.req_to_token_pool.size)
    check_once(
        "page", _pages(cache, requests, peek), cache.token_to_kv_pool_allocator.size // cache.page_size
    )
    lost = statistics(cache, requests).lost
    if lost:
        raise MemoryInvariantError(f"{lost} tokens of KV are unaccounted for")


def _owned_end(req: Request, page_size: int) -> int:
    return -(-req.kv_allocated_len // page_size) * page_size


def _rows(cache: PrefixCache, requests: Iterable[Request]) -> list[int]:
    held = [req.req_pool_idx for req in requests if req.req_pool_idx is not None]
    return [*cache.req_to_token_pool.free_slots, *held]


def _pages(cache: PrefixCache, requests: Iterable[Request], peek: Peek) -> list[int]:
    pages: list[int] = peek(cache.token_to_kv_pool_allocator.free_pages).tolist()
    for value in cache.values():
        pages += _pages_of(peek(value), cache.page_size)
    table = peek(cache.req_to_token_pool.req_to_token)
    for req in requests:
        row = table[req.req_pool_idx]
        pages += _pages_of(row[req.cache_protected_len : req.kv_allocated_len], cache.page_size)
    return pages


def _pages_of(slots: torch.Tensor, page_size: int) -> list[int]:
    pages: list[int] = torch.unique(slots // page_size).tolist()
    return pages


def check_once(what: str, found: Sequence[int], total: int) -> None:
    """Raise MemoryInvariantError unless ``found`` contains each of 1..``total`` once."""
    if sorted(found) == list(range(1, total + 1)):
        return
    counts = Counter(found)
    twice = sorted(item for item, count in counts.items() if count > 1)
    missing = sorted(set(range(1, total + 1)) - counts.keys())
    strange = sorted(counts.keys() - set(range(1, total + 1)))
    if twice or missing or strange:
        raise MemoryInvariantError(f"{what}s owned twice: {twice}, lost: {missing}, out of range: {strange}")
