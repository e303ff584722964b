"""Kernels of KV bookkeeping: slots of a batch's new tokens, and its rows of req_to_token.

One launch each, and none waits for the device: sizes come from shapes and host integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .registry import Access, Work, kernel

INT64 = 8  # bytes


def _each(values: torch.Tensor, lens: torch.Tensor, total: int) -> torch.Tensor:
    """``values[i]``, ``lens[i]`` times, for one i after the other: [total]."""
    return torch.repeat_interleave(values, lens, output_size=total)


def runs(first: torch.Tensor, lens: torch.Tensor, total: int) -> torch.Tensor:
    """``first[i]``, ``first[i] + 1``, ... ``lens[i]`` long, for one i after the other: [total] int64."""
    begin = torch.cumsum(lens, 0) - lens
    return _each(first - begin, lens, total) + torch.arange(total, device=lens.device)


def _ceil_div(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (lens + page_size - 1) // page_size


class _ExtendSlots(NamedTuple):
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    last_loc: torch.Tensor
    free_pages: torch.Tensor
    page_size: int
    num_tokens: int

    def meta(self) -> torch.Tensor:
        return nothing(self.num_tokens, dtype=torch.int64)

    def cost(self) -> Work:
        pages = self.num_tokens // self.page_size + self.seq_lens.shape[0]
        lens = nbytes(self.prefix_lens, self.seq_lens, self.last_loc)
        return Work(lens + INT64 * (pages + self.num_tokens))

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.prefix_lens, self.seq_lens, self.last_loc, self.free_pages)


@declared(
    "alloc_extend_slots(Tensor prefix_lens, Tensor seq_lens, Tensor last_loc, Tensor free_pages, "
    "int page_size, int num_tokens) -> Tensor",
    _ExtendSlots,
    integer=True,
)
def alloc_extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    num_tokens: int,
) -> torch.Tensor:
    """Slots [num_tokens] int64 of positions [prefix_len, seq_len) of every request.

    The rest of the page that ``last_loc`` lies in comes first, then pages from the front of ``free_pages``::

        prefix_len          ceil(prefix_len)                     seq_len
            |-- last_loc + 1 ... --|-- page --|-- page --|-- pa...  |
    """
    lens = seq_lens - prefix_lens
    old = runs(last_loc + 1, lens, num_tokens)
    if free_pages.shape[0] == 0:
        return old
    position = runs(prefix_lens, lens, num_tokens)
    page = position // page_size
    held = _ceil_div(prefix_lens, page_size)
    opened = _ceil_div(seq_lens, page_size) - held
    nth_free = page + _each(torch.cumsum(opened, 0) - opened - held, lens, num_tokens)
    new = free_pages[nth_free.clamp(min=0, max=free_pages.shape[0] - 1)] * page_size + position % page_size
    return torch.where(page < _each(held, lens, num_tokens), old, new)


class _DecodeSlots(NamedTuple):
    seq_lens: torch.Tensor
    last_loc: torch.Tensor
    free_pages: torch.Tensor
    page_size: int

    def meta(self) -> torch.Tensor:
        return nothing(self.seq_lens.shape[0], dtype=torch.int64)

    def cost(self) -> Work:
        return Work(nbytes(self.seq_lens, self.last_loc) + 2 * INT64 * self.seq_lens.shape[0])

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.seq_lens, self.last_loc, self.free_pages)


@declared(
    "alloc_decode_slots(Tensor seq_lens, Tensor last_loc, Tensor free_pages, int page_size) -> Tensor",
    _DecodeSlots,
    integer=True,
)
def alloc_decode_slots(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots [b] int64 of position seq_len - 1: behind ``last_loc``, or the next free page's first."""
    old = last_loc.to(torch.int64) + 1
    if free_pages.shape[0] == 0:
        return old
    opens = (seq_lens - 1) % page_size == 0
    nth_free = (torch.cumsum(opens, 0) - 1).clamp(min=0, max=free_pages.shape[0] - 1)
    return torch.where(opens, free_pages[nth_free] * page_size, old)


def write_runs(table: torch.Tensor, first: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``slots`` to the flat ``table``: ``lens[i]`` of them from ``first[i]`` on."""
    table.scatter_(0, runs(first, lens, slots.shape[0]), slots.to(table.dtype))


class _WriteIndices(NamedTuple):
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_tensors: Sequence[torch.Tensor]
    prefix_pointers: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    extend_lens: torch.Tensor
    out_cache_loc: torch.Tensor

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        return (self.req_pool_indices, *self.prefix_tensors, *self[3:])

    def cost(self) -> Work:
        slots = self.out_cache_loc.shape[0] + sum(prefix.shape[0] for prefix in self.prefix_tensors)
        return Work(nbytes(*self._inputs()) + self.req_to_token.element_size() * slots)

    def footprint(self) -> tuple[Access, ...]:
        rows = Access(self.req_to_token, write=True, rows=self.req_pool_indices, lens=self.seq_lens)
        return (rows, *reads(*self._inputs()))


@kernel(
    "write_cache_indices(Tensor(a!) req_to_token, Tensor req_pool_indices, Tensor[] prefix_tensors, "
    "Tensor prefix_pointers, Tensor prefix_lens, Tensor seq_lens, Tensor extend_lens, "
    "Tensor out_cache_loc) -> ()",
    meta=lambda *_: None,
    cost=lambda *args: _WriteIndices(*args).cost(),
    footprint=lambda *args: _WriteIndices(*args).footprint(),
    integer=True,
)
def _write_cache_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_tensors: Sequence[torch.Tensor],
    _prefix_pointers: torch.Tensor,
    prefix_lens: torch.Tensor,
    _seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    table = req_to_token.view(-1)
    first = req_pool_indices * req_to_token.shape[1]
    if prefix_tensors:
        write_runs(table, first, prefix_lens, torch.cat(list(prefix_tensors)))
    write_runs(table, first + prefix_lens, extend_lens, out_cache_loc)


def upload_prefix_pointers(prefix_tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[b] int64 on the device: the address of each request's prefix, uploaded from pageable memory.

    Only a CUDA kernel reads through raw addresses; elsewhere the same copy carries zeros.
    """
    addresses = [tensor.data_ptr() if tensor.is_cuda else 0 for tensor in prefix_tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def write_cache_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    *,
    prefix_tensors: Sequence[torch.Tensor],
    prefix_pointers: torch.Tensor,
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    """Write the prefix and the new slots of every request of an extend batch into its row, in one launch.

    req_to_token [rows, max_context_len] int32; lengths and ``req_pool_indices`` [b]; ``prefix_tensors`` b
    tensors [prefix_len] int64, empty ones on any device; ``out_cache_loc`` [sum of extend_lens] int64.
    """
    _write_cache_indices(
        req_to_token,
        req_pool_indices,
        [tensor for tensor in prefix_tensors if tensor.shape[0]],
        prefix_pointers,
        prefix_lens,
        seq_lens,
        extend_lens,
        out_cache_loc,
    )
