"""Bookkeeping of hot buffers: from slots of the page table to slots of KV on the device.

With KV on the host the page table's slots are logical: ``mapping`` [logical slots] int64 says where on the device the
KV of a logical slot is, 0 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .declare import INT64, Access, Work, Written, kernel, meta_tensor, meta_tensors, nbytes, reads
from .sparse import ABSENT

NOWHERE = (1 << 31) - 1  # a position that no request has


@kernel(
    cost=lambda out_cache_loc, page_size: Work(
        2 * nbytes(out_cache_loc) + INT64 * out_cache_loc.shape[0] // page_size
    ),
    rows={"mapping": "out_cache_loc"},
    integer=True,
    triton=True,
)
def map_prompt(mapping: Written, out_cache_loc: Tensor, free_pages: Tensor, page_size: int) -> None:
    """Gives each new logical slot [T] a device slot, in pages from the front of ``free_pages``.

    A request's new slots start at a page boundary: its only cached prefix is its own chunks, and those are whole pages.
    """
    offset = out_cache_loc % page_size
    page = (offset == 0).cumsum(0) - 1
    mapping[out_cache_loc] = free_pages[page] * page_size + offset


@kernel(
    meta=lambda slots: meta_tensor(slots.shape[0]),
    cost=lambda slots: Work(3 * nbytes(slots)),
    rows={"mapping": "slots"},
    integer=True,
)
def translate(mapping: Tensor, slots: Tensor) -> Tensor:
    """Device slots [n] int64 of logical ``slots`` [n]."""
    return mapping[slots.to(torch.int64)]


@kernel(
    meta=lambda slots, page_size: meta_tensor(-(-slots.shape[0] // page_size) * page_size),
    cost=lambda slots: Work(nbytes(slots) + 3 * INT64 * slots.shape[0]),
    rows={"mapping": "slots"},
    integer=True,
    triton=True,
)
def unmap(mapping: Written, slots: Tensor, page_size: int) -> Tensor:
    """Clears the mapping of a request's logical ``slots`` [n] int32 and returns their device slots, including the rest
    of the last page: [n rounded up to pages] int64."""
    logical = slots.to(torch.int64)
    pages = mapping[logical[::page_size]].unsqueeze(1) + torch.arange(page_size, device=mapping.device)
    mapping[logical] = 0
    return pages.flatten()


class NewestTokens(NamedTuple):
    """The new tokens of b requests, and the hot buffers that they belong to."""

    mapping: Written
    out_cache_loc: Tensor  # [b], their logical slots
    device_buffer: Tensor  # [rows, size + page]
    req_pool_indices: Tensor  # [b]
    seq_lens: Tensor  # [b], the new tokens included
    size: int


def _newest_footprint(newest: NewestTokens) -> tuple[Access, ...]:
    mapping, out_cache_loc, device_buffer, rows, seq_lens, size = newest
    return (
        Access(mapping, write=True, rows=out_cache_loc),
        *reads(out_cache_loc, rows, seq_lens),
        Access(device_buffer, write=False, rows=rows, lens=seq_lens.clamp(min=0, max=size + 1)),
    )


@kernel(
    cost=lambda out_cache_loc, req_pool_indices, seq_lens: Work(
        nbytes(out_cache_loc, req_pool_indices, seq_lens) + 2 * INT64 * seq_lens.shape[0]
    ),
    footprint=_newest_footprint,
    integer=True,
    triton=True,
)
def map_newest(newest: NewestTokens) -> None:
    """Maps each logical slot to its slot in the request's buffer: the token's position, at most ``size``."""
    mapping, out_cache_loc, device_buffer, rows, seq_lens, size = newest
    mapping[out_cache_loc] = device_buffer[rows, (seq_lens - 1).clamp(max=size)]


class PreviousTokens(NamedTuple):
    """Where the tokens before the new ones of b requests are found."""

    device_buffer: Tensor  # [rows, size + page]
    host_slots: Tensor  # [rows, context + page]
    staged_lens: Tensor  # [rows], how many positions were staged with the prompt
    req_pool_indices: Tensor  # [b]
    seq_lens: Tensor  # [b], the new tokens included
    size: int


def _previous_footprint(previous: PreviousTokens) -> tuple[Access, ...]:
    device_buffer, host_slots, staged_lens, rows, seq_lens, size = previous
    held = (seq_lens - 1).clamp(min=0)
    return (
        *reads(rows, seq_lens),
        Access(staged_lens, write=False, rows=rows),
        Access(device_buffer, write=False, rows=rows, lens=held.clamp(max=size + 1)),
        Access(host_slots, write=False, rows=rows, lens=held),
    )


@kernel(
    meta=lambda seq_lens: meta_tensors(2, seq_lens.shape[0]),
    cost=lambda req_pool_indices, seq_lens: Work(
        nbytes(req_pool_indices, seq_lens) + 5 * INT64 * seq_lens.shape[0]
    ),
    footprint=_previous_footprint,
    integer=True,
    triton=True,
)
def previous_tokens(previous: PreviousTokens) -> tuple[Tensor, Tensor]:
    """Returns the device slot and the host slot, [b] int64 each, of the token before each request's new one. The device
    slot is ABSENT for a token that was staged with its prompt."""
    device_buffer, host_slots, staged_lens, rows, seq_lens, size = previous
    position = seq_lens - 2
    slots = device_buffer[rows, position.clamp(max=size)]
    return slots.masked_fill(position < staged_lens[rows], ABSENT), host_slots[rows, position]


@kernel(
    cost=lambda tokens, row: Work(nbytes(*(table[row] for table in tokens))),
    footprint=lambda tokens, row: tuple(
        Access(table, write=True, rows=torch.tensor([row])) for table in tokens
    ),
    integer=True,
)
def empty_buffer(tokens: Sequence[Written], row: int) -> None:
    """Marks all slots of the hot buffer of a ``row`` as empty, in every layer; ``tokens`` are [rows, B] int32 each."""
    for table in tokens:
        table[row].fill_(NOWHERE)
