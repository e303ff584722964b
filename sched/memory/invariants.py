"""Checks that every KV slot is in exactly one place: by host integers after every step, by device values on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from ..request import Request
from .cache import PrefixCache
from .tree import upwards

Peek = Callable[[torch.Tensor], torch.Tensor]


class MemoryInvariantError(RuntimeError):
    """A slot is owned by nothing, or owned twice."""


def lost_tokens(cache: PrefixCache, requests: Iterable[Request]) -> int:
    """Tokens of KV that have no owner: 0 outside free groups; positive after a leak, negative when something is owned
    twice. ``requests`` are all requests that hold a row. Reads no device value."""
    allocator, page = cache.token_to_kv_pool_allocator, cache.page_size
    owned = [-(-req.kv_allocated_len // page) * page - req.cache_protected_len for req in requests]
    cached = cache.evictable_size() + cache.protected_size()
    return allocator.size - allocator.available_size() - cached - sum(owned)


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def check(cache: PrefixCache, requests: Sequence[Request], *, peek: Peek = unchanged) -> None:
    """Raise MemoryInvariantError unless every page and row is in exactly one place, and each request's row has the
    cache's slots for its cached prefix. Waits for the device unless ``peek`` reads its tensors without waiting."""
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
    for req in requests:
        cached = [slot for node in upwards(req.last_node) for slot in reversed(peek(node.value).tolist())]
        if cached[::-1] != table[req.req_pool_idx][: req.cache_protected_len].tolist():
            raise MemoryInvariantError(f"the row of request {req.id} has other slots than its cached prefix")
    lost = lost_tokens(cache, requests)
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
