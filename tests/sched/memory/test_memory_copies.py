"""What a free group and a match do on the device, counted by the virtual GPU. The copies of allocations are those of
steps, in tests/acceptance/test_ladder_cells.py."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from schedbench.sched.memory.cache import RadixCache
from schedbench.sched.memory.pools import KVAllocator, PagedAllocator, ReqToTokenPool
from tests.profiles.recorders import OperationCounter, counted_gpu

PREFIX = array("q", range(32))


@pytest.fixture
def tally() -> Iterator[OperationCounter]:
    with counted_gpu() as tally:
        yield tally


def radix_cache(tally: OperationCounter, page_size: int) -> RadixCache:
    """A cache that holds ``PREFIX``, on the virtual GPU."""
    device = tally.gpu.device
    allocator = (
        KVAllocator(256, 1, device) if page_size == 1 else PagedAllocator(256, page_size, device=device)
    )
    cache = RadixCache(ReqToTokenPool(4, 64, device=device), allocator)
    slots = allocator.alloc(32)
    assert slots is not None
    cache.tree.insert(PREFIX, slots)
    return cache


@pytest.mark.parametrize(("page_size", "syncs"), [(1, 0), (16, 1)])
def test_a_free_group_syncs_once_when_paged(tally: OperationCounter, page_size: int, syncs: int) -> None:
    cache = radix_cache(tally, page_size)
    allocator = cache.token_to_kv_pool_allocator
    slots = allocator.alloc(64)
    assert slots is not None
    tally.since_last()

    allocator.free_group_begin()
    allocator.free(slots[:16])
    allocator.free(slots[32:])
    allocator.free_group_end()

    counts = tally.since_last()
    assert counts["d2h!"] == counts["_unique2"] == syncs
    assert counts["cat"] == 2


def test_a_match_is_one_cat_and_a_miss_nothing(tally: OperationCounter) -> None:
    cache = radix_cache(tally, 1)
    cache.match_prefix(PREFIX[:8])
    tally.since_last()

    cache.match_prefix(PREFIX)
    assert tally.since_last() == {"cat": 1}
    cache.match_prefix(array("q", [9, 9]))
    assert tally.since_last() == {}
