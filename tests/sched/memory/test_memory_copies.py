"""What memory management copies and waits for, counted by the virtual GPU: upstream's rows that concern allocators."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
import torch

from schedbench.sched.kernels.allocation import upload_prefix_pointers, write_cache_indices
from schedbench.sched.memory.allocation import alloc_for_decode, alloc_for_extend
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


def lens(*values: int) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.tensor(values, dtype=torch.int64)
    return host, host.to("vgpu:0", non_blocking=True)


@pytest.mark.parametrize(("page_size", "uploads"), [(1, 0), (16, 2)])
def test_an_extend_uploads_one_length_per_missing_prefix_when_paged(
    tally: OperationCounter, page_size: int, uploads: int
) -> None:
    cache = radix_cache(tally, page_size)
    hit, miss = cache.match_prefix(PREFIX).device_indices, cache.match_prefix(array("q", [9])).device_indices
    prefix_tensors = [hit, miss, miss]
    (prefix_cpu, prefix), (seq_cpu, seq) = lens(32, 0, 0), lens(40, 8, 8)
    (_, extend), (_, rows) = lens(8, 8, 8), lens(1, 2, 3)
    tally.since_last()

    slots = alloc_for_extend(
        cache, prefix_tensors, 24, on_device=(prefix, seq), on_host=(prefix_cpu, seq_cpu)
    )
    assert tally.since_last()["h2d!"] == uploads

    write_cache_indices(
        cache.req_to_token_pool.req_to_token,
        rows,
        prefix_tensors=prefix_tensors,
        prefix_pointers=upload_prefix_pointers(prefix_tensors, cache.token_to_kv_pool_allocator.device),
        prefix_lens=prefix,
        seq_lens=seq,
        extend_lens=extend,
        out_cache_loc=slots,
    )
    assert tally.since_last() == {"h2d!": 1, "sync": 1, "write_cache_indices": 1}


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_decode_copies_nothing_and_waits_for_nothing(tally: OperationCounter, page_size: int) -> None:
    cache = radix_cache(tally, page_size)
    (_, rows), (seq_cpu, seq) = lens(1, 2), lens(16, 20)
    tally.since_last()

    alloc_for_decode(cache, req_pool_indices=rows, seq_lens=seq, seq_lens_cpu=seq_cpu)

    counts = tally.since_last()
    assert not [name for name in counts if name.startswith(("h2d", "d2h", "sync"))]
    assert counts["alloc_decode_slots"] == (page_size > 1)


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
