"""The operations of the radix cache, one at a time."""

from __future__ import annotations

from array import array

import pytest
import torch

from schedbench.sched.memory.cache import RadixCache
from schedbench.sched.memory.pools import KVAllocator, PagedAllocator, ReqToTokenPool

CPU = torch.device("cpu")


def tokens(*ids: int) -> array[int]:
    return array("q", ids)


def slots(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(ReqToTokenPool(4, 64, device=CPU), KVAllocator(64, 1, CPU))


@pytest.fixture
def paged_cache() -> RadixCache:
    return RadixCache(ReqToTokenPool(4, 64, device=CPU), PagedAllocator(64, 4, device=CPU))


def test_an_empty_tree_matches_nothing(cache: RadixCache) -> None:
    match = cache.match_prefix(tokens(1, 2, 3))

    assert match.matched == 0
    assert match.device_indices.tolist() == []
    assert match.last_node is cache.tree.root


def test_an_empty_prompt_matches_nothing(cache: RadixCache) -> None:
    cache.tree.insert(tokens(1, 2), slots(10, 11))

    assert cache.match_prefix(tokens()).matched == 0
    assert cache.tree.insert(tokens(), slots()).present == 0
    assert cache.evictable_size() + cache.protected_size() == 2


def test_a_prefix_is_found_and_its_node_split(cache: RadixCache) -> None:
    cache.tree.insert(tokens(1, 2, 3, 4), slots(10, 11, 12, 13))

    match = cache.match_prefix(tokens(1, 2, 9))

    assert match.device_indices.tolist() == [10, 11]
    assert [node.value.tolist() for node in cache.tree.nodes()] == [[10, 11], [12, 13]]
    assert cache.match_prefix(tokens(1, 2, 3, 4)).device_indices.tolist() == [10, 11, 12, 13]


def test_a_second_insert_of_the_same_tokens_keeps_the_first_slots(cache: RadixCache) -> None:
    assert cache.tree.insert(tokens(1, 2, 3), slots(10, 11, 12)).present == 0
    assert cache.tree.insert(tokens(1, 2, 3), slots(20, 21, 22)).present == 3
    assert cache.tree.insert(tokens(1, 2, 4), slots(30, 31, 32)).present == 2

    assert cache.match_prefix(tokens(1, 2, 3)).device_indices.tolist() == [10, 11, 12]
    assert cache.match_prefix(tokens(1, 2, 4)).device_indices.tolist() == [10, 11, 32]
    assert cache.evictable_size() + cache.protected_size() == 4


def test_pages_are_kept_and_split_whole(paged_cache: RadixCache) -> None:
    paged_cache.tree.insert(tokens(*range(10)), slots(*range(4, 12)))

    assert paged_cache.evictable_size() + paged_cache.protected_size() == 8
    assert paged_cache.match_prefix(tokens(*range(7))).device_indices.tolist() == [4, 5, 6, 7]
    assert paged_cache.match_prefix(tokens(*range(8))).matched == 8
    assert paged_cache.match_prefix(tokens(0, 1, 2)).matched == 0


def test_locks_protect_the_whole_path_and_move_sizes(cache: RadixCache) -> None:
    cache.tree.insert(tokens(1, 2, 3, 4), slots(10, 11, 12, 13))
    upper = cache.match_prefix(tokens(1, 2)).last_node
    lower = cache.match_prefix(tokens(1, 2, 3, 4)).last_node

    cache.inc_lock_ref(upper)
    assert (cache.evictable_size(), cache.protected_size()) == (2, 2)
    cache.inc_lock_ref(lower)
    assert (cache.evictable_size(), cache.protected_size()) == (0, 4)
    cache.dec_lock_ref(upper)
    assert (cache.evictable_size(), cache.protected_size()) == (0, 4)
    cache.dec_lock_ref(lower)
    assert (cache.evictable_size(), cache.protected_size()) == (4, 0)


def test_a_split_under_a_lock_stays_locked(cache: RadixCache) -> None:
    cache.tree.insert(tokens(1, 2, 3, 4), slots(10, 11, 12, 13))
    node = cache.match_prefix(tokens(1, 2, 3, 4)).last_node
    cache.inc_lock_ref(node)

    cache.match_prefix(tokens(1, 2))

    assert cache.evict(100) == 0
    cache.dec_lock_ref(node)
    assert cache.evict(100) == 4


def test_unlocking_too_often_is_an_error(cache: RadixCache) -> None:
    cache.tree.insert(tokens(1), slots(10))
    with pytest.raises(AssertionError, match="unlocked"):
        cache.dec_lock_ref(cache.match_prefix(tokens(1)).last_node)


def test_the_least_recently_used_leaf_goes_first(cache: RadixCache) -> None:
    for first in (1, 2, 3):
        cache.tree.insert(tokens(first, 0), slots(first * 10, first * 10 + 1))
    cache.match_prefix(tokens(1, 0))

    assert cache.evict(1) == 2
    assert cache.match_prefix(tokens(2, 0)).matched == 0
    assert cache.evict(2) == 2
    assert cache.match_prefix(tokens(3, 0)).matched == 0
    assert cache.match_prefix(tokens(1, 0)).matched == 2


def test_a_parent_goes_after_its_last_child(cache: RadixCache) -> None:
    cache.tree.insert(tokens(1, 2), slots(10, 11))
    cache.tree.insert(tokens(1, 2, 3), slots(0, 0, 12))
    cache.tree.insert(tokens(1, 2, 4), slots(0, 0, 13))

    assert cache.evict(2) == 2
    assert cache.evictable_size() + cache.protected_size() == 2
    assert cache.evict(100) == 2
    assert cache.evictable_size() + cache.protected_size() == 0


def test_evicted_slots_return_to_the_allocator(cache: RadixCache) -> None:
    allocator = cache.token_to_kv_pool_allocator
    value = allocator.alloc(5)
    assert value is not None
    cache.tree.insert(tokens(1, 2, 3, 4, 5), value)

    cache.evict(1)

    assert allocator.available_size() == 64
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 65))
