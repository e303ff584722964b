"""Bookkeeping kernels against loops over requests and positions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from schedbench.sched.kernels.allocation import (
    alloc_decode_slots,
    alloc_extend_slots,
    upload_prefix_pointers,
    write_cache_indices,
)
from schedbench.sched.kernels.declare import kernels

CPU = torch.device("cpu")
REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=5)


def lens(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def extend_by_hand(requests: list[tuple[int, int]], last: list[int], free: list[int], page: int) -> list[int]:
    free = list(free)
    slots: list[int] = []
    for (prefix, extend), slot in zip(requests, last, strict=True):
        for position in range(prefix, prefix + extend):
            slot = free.pop(0) * page if position % page == 0 else slot + 1
            slots.append(slot)
    return slots


@given(requests=REQUESTS, page=st.sampled_from([1, 4, 16]))
def test_extend_slots_follow_the_positions(requests: list[tuple[int, int]], page: int) -> None:
    last = [1000 * (i + 1) * page + (prefix - 1) % page for i, (prefix, _) in enumerate(requests)]
    free = list(range(500, 100, -1))

    slots = alloc_extend_slots(
        lens([prefix for prefix, _ in requests]),
        lens([prefix + extend for prefix, extend in requests]),
        lens(last).to(torch.int32),
        lens(free),
        page,
        sum(extend for _, extend in requests),
    )

    assert slots.dtype == torch.int64
    assert slots.tolist() == extend_by_hand(requests, last, free, page)


@given(befores=st.lists(st.integers(0, 40), min_size=1, max_size=8), page=st.sampled_from([1, 4, 16]))
def test_decode_slots_are_an_extend_by_one(befores: list[int], page: int) -> None:
    last = [1000 * (i + 1) * page + (before - 1) % page for i, before in enumerate(befores)]
    free = list(range(500, 100, -1))

    slots = alloc_decode_slots(lens(befores) + 1, lens(last).to(torch.int32), lens(free), page)

    assert slots.dtype == torch.int64
    assert slots.tolist() == extend_by_hand([(before, 1) for before in befores], last, free, page)


@given(requests=REQUESTS)
def test_rows_hold_prefix_then_new_slots_and_nothing_else_changes(requests: list[tuple[int, int]]) -> None:
    rows = list(range(len(requests), 0, -1))
    prefixes = [
        torch.arange(100 * row, 100 * row + prefix) for row, (prefix, _) in zip(rows, requests, strict=True)
    ]
    expected = torch.full((7, 90), -5, dtype=torch.int32)
    table = expected.clone()
    new = 5000
    for row, prefix, (start, extend) in zip(rows, prefixes, requests, strict=True):
        expected[row, :start] = prefix
        expected[row, start : start + extend] = torch.arange(new, new + extend)
        new += extend

    write_cache_indices(
        table,
        lens(rows),
        prefix_tensors=prefixes,
        prefix_pointers=upload_prefix_pointers(prefixes, CPU),
        prefix_lens=lens([prefix for prefix, _ in requests]),
        seq_lens=lens([prefix + extend for prefix, extend in requests]),
        extend_lens=lens([extend for _, extend in requests]),
        out_cache_loc=torch.arange(5000, new),
    )

    assert torch.equal(table, expected)


def test_pointers_are_one_int64_per_request() -> None:
    pointers = upload_prefix_pointers([torch.empty(0), torch.zeros(3)], CPU)

    assert pointers.dtype == torch.int64
    assert pointers.shape == (2,)


def test_the_cost_of_slots_and_their_accesses() -> None:
    b, num_tokens, page = lens([1, 2]), 9, 4
    extend, decode = kernels()[alloc_extend_slots], kernels()[alloc_decode_slots]
    extend_args, decode_args = (b, b + 4, b, b, page, num_tokens), (b, b, b, page)

    assert extend.cost is not None and extend.cost(*extend_args).bytes == 8 * (6 + 9 + 2 + 2)
    assert decode.cost is not None and decode.cost(*decode_args).bytes == 8 * 8
    assert len(extend.footprint(*extend_args)) == 4


def test_the_row_write_touches_its_requests_rows_only() -> None:
    write = kernels()[torch.ops.schedbench.write_cache_indices.default]
    table, rows, prefix = torch.zeros(4, 8, dtype=torch.int32), lens([2]), torch.arange(3)
    args = (table, rows, [prefix], lens([0]), lens([3]), lens([5]), lens([2]), lens([7, 8]))

    written = [access for access in write.footprint(*args) if access.write]

    assert [access.tensor for access in written] == [table]
    assert written[0].rows is rows
    assert write.cost is not None and write.cost(*args).bytes == 12 * 5 + 40
