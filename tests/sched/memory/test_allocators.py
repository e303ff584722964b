"""Both allocators compared with a list of requests and their slots, and the table of the requests' rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from schedbench.sched.memory.pools import KVAllocator, PagedAllocator, ReqToTokenPool

CPU = torch.device("cpu")


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_tokens_come_from_the_front_and_return_to_the_back() -> None:
    allocator = KVAllocator(4, 1, CPU)
    first = allocator.alloc(3)
    assert first is not None
    assert first.tolist() == [1, 2, 3]

    allocator.free(first[:1])

    again = allocator.alloc(2)
    assert again is not None
    assert again.tolist() == [4, 1]
    assert allocator.alloc(1) is None


def test_a_group_is_released_by_one_cat_at_its_end() -> None:
    allocator = KVAllocator(4, 1, CPU)
    taken = allocator.alloc(4)
    assert taken is not None

    allocator.free_group_begin()
    allocator.free(taken[2:])
    allocator.free(taken[:1].to(torch.int32))
    assert allocator.available_size() == 0
    allocator.free_group_end()

    assert allocator.free_pages.tolist() == [3, 4, 1]
    assert allocator.free_pages.dtype == torch.int64


def test_freed_pages_return_whole_and_in_front() -> None:
    allocator = PagedAllocator(16, 4, device=CPU)
    taken = allocator.alloc(12)
    assert taken is not None
    assert taken.tolist() == list(range(4, 16))

    allocator.free(taken[3:5])

    assert allocator.free_pages.tolist() == [1, 2, 4]


def test_a_pool_of_broken_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of pages"):
        PagedAllocator(10, 4, device=CPU)
    with pytest.raises(ValueError, match="whole number of pages"):
        PagedAllocator(8, 4, device=CPU).alloc(3)


class AllocatorMachine(RuleBasedStateMachine):
    """Requests grow and go; pages of 1 use the token allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[list[int]] = []

    @initialize(page_size=st.sampled_from([1, 2, 16]), pages=st.integers(1, 60))
    def build(self, page_size: int, pages: int) -> None:
        size = page_size * pages
        self.paged = PagedAllocator(size, page_size, device=CPU)
        self.plain = KVAllocator(size, 1, CPU)
        self.allocator = self.paged if page_size > 1 else self.plain

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.allocator.page_size)

    def extend(self, grown: list[tuple[int, int]]) -> torch.Tensor | None:
        """``grown`` holds (tokens before, tokens after) of each request, longest-held first."""
        total = sum(after - before for before, after in grown)
        if self.allocator is self.plain:
            return self.plain.alloc(total)
        before, after = (lens(*column) for column in zip(*grown, strict=True))
        ends = [held[-1] if held else -1 for held in self.held[: len(grown)]]
        last_loc, extents = lens(*ends, *[-1] * (len(grown) - len(ends))), (before, after)
        return self.paged.alloc_extend(last_loc, total, on_device=extents, on_host=extents)

    @rule(joining=st.lists(st.integers(1, 20), max_size=3), growth=st.lists(st.integers(1, 20), max_size=3))
    def extend_some(self, joining: list[int], growth: list[int]) -> None:
        old = [len(held) for held in self.held[: len(growth)]]
        grown = [(n, n + more) for n, more in zip(old, growth, strict=False)]
        if joining and len(grown) == len(self.held):
            grown += [(0, n) for n in joining]
        if not grown:
            return
        needed = sum(self.pages_of(after) - self.pages_of(before) for before, after in grown)
        slots = self.extend(grown)
        if needed * self.allocator.page_size > self.free_before:
            assert slots is None
            return
        assert slots is not None
        self.give(grown, slots.tolist())

    def give(self, grown: list[tuple[int, int]], slots: list[int]) -> None:
        for index, (before, after) in enumerate(grown):
            if index == len(self.held):
                self.held.append([])
            self.held[index] += slots[: after - before]
            slots = slots[after - before :]
        assert not slots

    @rule()
    def decode_all(self) -> None:
        if not self.held:
            return
        after = lens(*(len(held) + 1 for held in self.held))
        if self.allocator is self.plain:
            slots = self.plain.alloc(len(self.held))
        else:
            last = lens(*(held[-1] for held in self.held))
            slots = self.paged.alloc_decode(seq_lens_cpu=after, seq_lens=after, last_loc=last)
        if slots is None:
            opened = sum(len(held) % self.allocator.page_size == 0 for held in self.held)
            assert opened * self.allocator.page_size > self.free_before
        else:
            self.give([(n - 1, n) for n in after.tolist()], slots.tolist())

    @rule(indices=st.sets(st.integers(0, 5), min_size=1), grouped=st.booleans())
    def free_some(self, indices: set[int], grouped: bool) -> None:
        if grouped:
            self.allocator.free_group_begin()
        for index in sorted(indices & set(range(len(self.held))), reverse=True):
            self.allocator.free(lens(*self.held.pop(index)))
        if grouped:
            self.allocator.free_group_end()

    @rule(pages=st.integers(0, 4))
    def try_and_roll_back(self, pages: int) -> None:
        free_pages = self.allocator.free_pages
        self.allocator.alloc(pages * self.allocator.page_size)
        self.allocator.free_pages = free_pages

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        size = self.allocator.page_size
        pages = self.allocator.free_pages.tolist()
        for held in self.held:
            assert all(slot % size == position % size for position, slot in enumerate(held))
            firsts = [slot // size for slot in held[::size]]
            assert [slot // size for slot in held] == [firsts[p // size] for p in range(len(held))]
            pages += firsts
        assert sorted(pages) == list(range(1, self.allocator.size // size + 1))
        self.free_before = self.allocator.available_size()


AllocatorMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestAllocatorMachine = AllocatorMachine.TestCase


def test_rows_come_from_the_front_and_return_to_the_back() -> None:
    pool = ReqToTokenPool(3, 8, device=CPU)

    assert pool.alloc(4) is None
    assert pool.available_size() == 3
    assert pool.alloc(2) == [1, 2]
    pool.free(1)
    assert pool.alloc(2) == [3, 1]
    assert pool.alloc(1) is None
    assert pool.alloc(0) == []


def test_the_table_starts_at_zero_with_a_padding_row() -> None:
    pool = ReqToTokenPool(3, 8, device=CPU)

    assert pool.req_to_token.shape == (4, 8)
    assert pool.req_to_token.dtype == torch.int32
    assert not pool.req_to_token.any()
