"""The fused launch for a step's bookkeeping gives the same results as the small kernels in sequence."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.sched.kernels.allocation import (
    alloc_decode_slots,
    alloc_extend_slots,
    copy_pages,
    decode_inputs,
    place_decode,
    place_extend,
    write_cache_indices,
)
from schedbench.sched.kernels.declare import kernels
from schedbench.sched.memory.pools import KVAllocator, PagedAllocator

ROWS, CONTEXT, POOL = 9, 64, 400


class Case(NamedTuple):
    """Requests in rows 1, 2, ... with ``prefix`` cached tokens, whole pages, and ``new`` ones."""

    page_size: int
    prefix: list[int]
    new: list[int]


CASES = st.builds(
    lambda page, parts: Case(page, [page * (pages % 3) for pages, _ in parts], [new for _, new in parts]),
    st.sampled_from([1, 4]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), min_size=1, max_size=6),
)


def ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def prefixes(case: Case) -> list[torch.Tensor]:
    """Slots of the cached prefixes, from pages behind those that are free."""
    firsts = range(POOL * case.page_size, 2 * POOL * case.page_size, 20 * case.page_size)
    return [torch.arange(first, first + length) for first, length in zip(firsts, case.prefix, strict=False)]


def pieces(case: Case, table: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    rows, prefix_lens = ids(list(range(1, len(case.new) + 1))), ids(case.prefix)
    lens = prefix_lens + ids(case.new)
    last = torch.cat([slots[-1:] if len(slots) else ids([-1]) for slots in prefixes(case)])
    slots: torch.Tensor = alloc_extend_slots(prefix_lens, lens, last, free, case.page_size, sum(case.new))
    write_cache_indices(
        table,
        rows,
        prefix_tensors=prefixes(case),
        prefix_pointers=torch.zeros_like(rows),
        prefix_lens=prefix_lens,
        seq_lens=lens,
        extend_lens=ids(case.new),
        out_cache_loc=slots,
    )
    return slots


@given(CASES)
@settings(max_examples=60)
def test_prompts(case: Case) -> None:
    free = torch.arange(1, POOL)
    tables = [torch.zeros(ROWS, CONTEXT, dtype=torch.int32) for _ in range(2)]
    expected = pieces(case, tables[0], free)
    rows, prefix_lens = ids(list(range(1, len(case.new) + 1))), ids(case.prefix)
    slots = place_extend(
        tables[1],
        rows,
        torch.cat(prefixes(case)),
        prefix_lens,
        prefix_lens + ids(case.new),
        free,
        case.page_size,
        sum(case.new),
    )
    assert torch.equal(slots, expected)
    assert torch.equal(*tables)


@given(CASES)
@settings(max_examples=60)
def test_tokens(case: Case) -> None:
    free = torch.arange(POOL, 2 * POOL)
    table = torch.zeros(ROWS, CONTEXT, dtype=torch.int32)
    pieces(case, table, torch.arange(1, POOL))
    rows, lens = ids(list(range(1, len(case.new) + 1))), ids(case.prefix) + ids(case.new)
    before = table.clone()
    slots, longer, orig = place_decode(table, rows, lens, lens.to(torch.int32), free, case.page_size)
    last = before[rows, lens - 1]
    expected = (
        free[: len(rows)] if case.page_size == 1 else alloc_decode_slots(lens + 1, last, free, case.page_size)
    )
    assert torch.equal(slots, expected)
    assert torch.equal(longer, lens + 1) and torch.equal(orig, (lens + 1).to(torch.int32))
    before[rows, lens] = expected.to(torch.int32)
    assert torch.equal(table, before)


@pytest.mark.parametrize(
    ("rows", "lens", "longest"),
    [([4, 2], [10, 3], 10), ([4, 2, 0], [CONTEXT + 3, -1000, -1], CONTEXT)],
    ids=["within the table", "beyond its ends"],
)
def test_the_pages_copy_holds_exactly_what_a_forward_reads(
    rows: list[int], lens: list[int], longest: int
) -> None:
    table = torch.arange(ROWS * CONTEXT, dtype=torch.int32).view(ROWS, CONTEXT)
    pages, expected = torch.full_like(table, -1), torch.full_like(table, -1)
    copy_pages(pages, table, ids(rows), ids(lens), longest)
    for row, length in zip(rows, lens, strict=True):
        expected[row, : max(length, 0)] = table[row, : max(length, 0)]
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("copied", [False, True])
def test_a_decodes_inputs_come_in_one_launch(copied: bool) -> None:
    table = torch.arange(ROWS * CONTEXT, dtype=torch.int32).view(ROWS, CONTEXT)
    pages = torch.full_like(table, -1) if copied else None
    tokens = torch.arange(100, 100 + ROWS)
    input_ids, positions = decode_inputs(tokens, ids([4, 2]), ids([10, 3]), table, pages, 10)
    assert input_ids.tolist() == [104, 102] and positions.tolist() == [9, 2]
    assert pages is None or int((pages >= 0).sum()) == 13


def test_a_copy_costs_what_it_moves() -> None:
    table = torch.zeros(ROWS, CONTEXT, dtype=torch.int32)
    found = kernels()[copy_pages]
    assert found.cost is not None
    short, long = (found.cost(table, table, ids([1]), ids([length]), 64) for length in (8, 64))
    assert long.bytes - short.bytes == 2 * 4 * 56
    written = [access for access in found.footprint(table, table, ids([1]), ids([8]), 8) if access.write]
    assert [access.rows is not None and access.rows.tolist() for access in written] == [[1]]


@pytest.mark.parametrize("page_size", [1, 4])
def test_claimed_pages_leave_the_free_list(page_size: int) -> None:
    cpu = torch.device("cpu")
    allocator = KVAllocator(8, 1, cpu) if page_size == 1 else PagedAllocator(32, 4, device=cpu)
    first = allocator.claim(3)
    assert first is not None and first.tolist() == list(range(1, 9))
    assert allocator.available_size() == 5 * page_size
    again = allocator.claim(0)
    assert again is not None and again.tolist() == list(range(4, 9))
    assert allocator.claim(6) is None
