"""Bookkeeping of hot buffers: from the slots of the page table to those where KV lies on the device.

With KV on the host the page table's slots are logical: ``mapping`` [logical slots] int64 says where on the device the
KV of one lies, 0 for nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .indexer import ABSENT
from .registry import Access, Work, kernel

INT64 = 8  # bytes


class _MapPrompt(NamedTuple):
    mapping: torch.Tensor
    out_cache_loc: torch.Tensor
    free_pages: torch.Tensor
    page_size: int

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        return Work(2 * nbytes(self.out_cache_loc) + INT64 * self.out_cache_loc.shape[0] // self.page_size)

    def footprint(self) -> tuple[Access, ...]:
        written = Access(self.mapping, write=True, rows=self.out_cache_loc)
        return (written, *reads(self.out_cache_loc, self.free_pages))


@declared(
    "map_prompt(Tensor(a!) mapping, Tensor out_cache_loc, Tensor free_pages, int page_size) -> ()",
    _MapPrompt,
    integer=True,
    triton="buffers",
)
def map_prompt(
    mapping: torch.Tensor, out_cache_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> None:
    """Gives each new logical slot [T] a device slot, in pages from the front of ``free_pages``.

    A request's new slots begin with a page: it has no cached prefix but its own chunks, and those are whole pages.
    """
    offset = out_cache_loc % page_size
    page = (offset == 0).cumsum(0) - 1
    mapping[out_cache_loc] = free_pages[page] * page_size + offset


class _Translate(NamedTuple):
    mapping: torch.Tensor
    slots: torch.Tensor

    def meta(self) -> torch.Tensor:
        return nothing(self.slots.shape[0], dtype=torch.int64)

    def cost(self) -> Work:
        return Work(3 * nbytes(self.slots))

    def footprint(self) -> tuple[Access, ...]:
        return (Access(self.mapping, write=False, rows=self.slots), *reads(self.slots))


@declared("translate(Tensor mapping, Tensor slots) -> Tensor", _Translate, integer=True)
def translate(mapping: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Device slots [n] int64 of logical ``slots`` [n]."""
    return mapping[slots.to(torch.int64)]


class _Unmap(NamedTuple):
    mapping: torch.Tensor
    slots: torch.Tensor
    page_size: int

    def meta(self) -> torch.Tensor:
        return nothing(-(-self.slots.shape[0] // self.page_size) * self.page_size, dtype=torch.int64)

    def cost(self) -> Work:
        return Work(nbytes(self.slots) + 3 * INT64 * self.slots.shape[0])

    def footprint(self) -> tuple[Access, ...]:
        return (Access(self.mapping, write=True, rows=self.slots), *reads(self.slots))


@declared(
    "unmap(Tensor(a!) mapping, Tensor slots, int page_size) -> Tensor",
    _Unmap,
    integer=True,
    triton="buffers",
)
def unmap(mapping: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The device slots of a request's logical ``slots`` [n] int32, whose mapping is cleared; the rest of the last page
    included: [n rounded up to pages] int64."""
    logical = slots.to(torch.int64)
    pages = mapping[logical[::page_size]].unsqueeze(1) + torch.arange(page_size, device=mapping.device)
    mapping[logical] = 0
    return pages.flatten()


class _MapNewest(NamedTuple):
    mapping: torch.Tensor
    out_cache_loc: torch.Tensor
    device_buffer: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    size: int

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        inputs = nbytes(self.out_cache_loc, self.req_pool_indices, self.seq_lens)
        return Work(inputs + 2 * INT64 * self.seq_lens.shape[0])

    def footprint(self) -> tuple[Access, ...]:
        rows = self.req_pool_indices
        held = self.seq_lens.clamp(min=0, max=self.size + 1)
        return (
            Access(self.mapping, write=True, rows=self.out_cache_loc),
            *reads(self.out_cache_loc, rows, self.seq_lens),
            Access(self.device_buffer, write=False, rows=rows, lens=held),
        )


@declared(
    "map_newest(Tensor(a!) mapping, Tensor out_cache_loc, Tensor device_buffer, Tensor req_pool_indices, "
    "Tensor seq_lens, int size) -> ()",
    _MapNewest,
    integer=True,
    triton="buffers",
)
def map_newest(
    mapping: torch.Tensor,
    out_cache_loc: torch.Tensor,
    device_buffer: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    size: int,
) -> None:
    """The new token's logical slot [b] leads to its place in the request's buffer: its position, at most ``size``.
    ``seq_lens`` [b] count it."""
    place = (seq_lens - 1).clamp(max=size)
    mapping[out_cache_loc] = device_buffer[req_pool_indices, place]


class _PreviousTokens(NamedTuple):
    device_buffer: torch.Tensor
    host_slots: torch.Tensor
    staged_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    size: int

    def meta(self) -> tuple[torch.Tensor, torch.Tensor]:
        b = self.seq_lens.shape[0]
        return nothing(b, dtype=torch.int64), nothing(b, dtype=torch.int64)

    def cost(self) -> Work:
        return Work(nbytes(self.req_pool_indices, self.seq_lens) + 5 * INT64 * self.seq_lens.shape[0])

    def footprint(self) -> tuple[Access, ...]:
        rows, held = self.req_pool_indices, (self.seq_lens - 1).clamp(min=0)
        return (
            *reads(rows, self.seq_lens),
            Access(self.staged_lens, write=False, rows=rows),
            Access(self.device_buffer, write=False, rows=rows, lens=held.clamp(max=self.size + 1)),
            Access(self.host_slots, write=False, rows=rows, lens=held),
        )


@kernel(
    "previous_tokens(Tensor device_buffer, Tensor host_slots, Tensor staged_lens, Tensor req_pool_indices, "
    "Tensor seq_lens, int size) -> (Tensor, Tensor)",
    meta=lambda *args: _PreviousTokens(*args).meta(),
    cost=lambda *args: _PreviousTokens(*args).cost(),
    footprint=lambda *args: _PreviousTokens(*args).footprint(),
    integer=True,
    triton="buffers",
)
def previous_tokens(
    device_buffer: torch.Tensor,
    host_slots: torch.Tensor,
    staged_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the token before the new one lies on the device and where it belongs on the host, [n] int64 each; the
    former is ABSENT for a token that was staged with its prompt (position below ``staged_lens`` [rows])."""
    position = seq_lens - 2
    slots = device_buffer[req_pool_indices, position.clamp(max=size)]
    there = position < staged_lens[req_pool_indices]
    return slots.masked_fill(there, ABSENT), host_slots[req_pool_indices, position]
