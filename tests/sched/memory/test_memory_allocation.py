"""Allocation for batches: the cache is evicted to make room, and a plan that cannot be met is an error. What the tree
of the cache keeps, test_radix_tree.py asks."""

from __future__ import annotations

from array import array

import pytest
import torch

from schedbench.sched.memory.allocation import (
    OutOfKVMemoryError,
    alloc_for_decode,
    alloc_token_slots,
    last_locations,
)
from schedbench.sched.memory.cache import RadixCache
from schedbench.sched.memory.invariants import MemoryInvariantError, check, lost_tokens
from schedbench.sched.memory.pools import KVAllocator, PagedAllocator, ReqToTokenPool

CPU = torch.device("cpu")


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(ReqToTokenPool(2, 16, device=CPU), KVAllocator(6, 1, CPU))


@pytest.fixture
def paged_cache() -> RadixCache:
    return RadixCache(ReqToTokenPool(2, 16, device=CPU), PagedAllocator(16, 4, device=CPU))


def fill(cache: RadixCache, *ids: int) -> None:
    cache.tree.insert(array("q", ids), alloc_token_slots(cache, len(ids)))


def test_the_cache_is_evicted_only_when_the_allocator_runs_short(cache: RadixCache) -> None:
    fill(cache, 1, 2, 3)
    alloc_token_slots(cache, 2)
    assert cache.evictable_size() + cache.protected_size() == 3

    alloc_token_slots(cache, 3)

    assert cache.evictable_size() + cache.protected_size() == 0
    assert cache.token_to_kv_pool_allocator.available_size() == 1


def test_evicted_slots_return_to_the_allocator(cache: RadixCache) -> None:
    fill(cache, 1, 2, 3, 4, 5)

    assert cache.evict(1) == 5
    assert sorted(cache.token_to_kv_pool_allocator.free_pages.tolist()) == list(range(1, 7))


def test_an_empty_tree_and_an_empty_prompt_match_nothing(cache: RadixCache) -> None:
    match = cache.match_prefix(array("q", [1, 2, 3]))
    assert match.device_indices.tolist() == []
    assert (match.last_node, match.matched) == (cache.tree.root, 0)

    fill(cache, 1, 2)
    assert cache.match_prefix(array("q")).matched == 0


def test_unlocking_too_often_is_an_error(cache: RadixCache) -> None:
    fill(cache, 1)
    with pytest.raises(AssertionError, match="unlocked"):
        cache.dec_lock_ref(cache.match_prefix(array("q", [1])).last_node)


def test_what_is_locked_is_not_taken(cache: RadixCache) -> None:
    fill(cache, 1, 2, 3)
    cache.inc_lock_ref(cache.match_prefix(array("q", [1, 2])).last_node)

    with pytest.raises(OutOfKVMemoryError, match=r"5 new tokens do not fit: 4 KV slots are free.*2 in use"):
        alloc_token_slots(cache, 5)


def test_a_paged_decode_reads_each_rows_last_slot(paged_cache: RadixCache) -> None:
    paged_cache.req_to_token_pool.req_to_token[1, 2] = 14
    lens = torch.tensor([3, 4])

    slots = alloc_for_decode(
        paged_cache, req_pool_indices=torch.tensor([1, 2]), seq_lens=lens, seq_lens_cpu=lens
    )

    assert slots.tolist() == [15, 4]


def test_the_last_location_of_an_empty_prefix_is_minus_one() -> None:
    prefixes = [torch.tensor([4, 5]), torch.empty(0, dtype=torch.int64), torch.tensor([9])]

    assert last_locations(prefixes, CPU).tolist() == [5, -1, 9]


def test_a_leak_is_counted_and_named_by_the_check(cache: RadixCache) -> None:
    lost = alloc_token_slots(cache, 1)

    assert lost_tokens(cache, []) == 1
    with pytest.raises(MemoryInvariantError, match=rf"pages owned twice: \[\], lost: \[{lost.item()}\]"):
        check(cache, [])


def test_a_double_free_is_found(cache: RadixCache) -> None:
    slot = alloc_token_slots(cache, 1)
    cache.token_to_kv_pool_allocator.free(slot)
    cache.token_to_kv_pool_allocator.free(slot)

    assert lost_tokens(cache, []) == -1
    with pytest.raises(MemoryInvariantError, match=r"owned twice: \[1\]"):
        check(cache, [])


def test_a_row_that_was_not_returned_is_found(cache: RadixCache) -> None:
    cache.req_to_token_pool.alloc(1)

    with pytest.raises(MemoryInvariantError, match=r"rows owned twice: \[\], lost: \[1\]"):
        check(cache, [])
