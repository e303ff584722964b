"""Kernels of KV bookkeeping: slots of a batch's new tokens, and its rows of req_to_token.

Each is one launch, and none waits for the device: sizes come from shapes and host integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .declare import INT64, kernel, meta_tensor, nbytes, reads
from .registry import Access, Work


def _each(values: Tensor, lens: Tensor, total: int) -> Tensor:
    """``values[i]``, repeated ``lens[i]`` times, for one i after the other: [total]."""
    return torch.repeat_interleave(values, lens, output_size=total)


def runs(first: Tensor, lens: Tensor, total: int) -> Tensor:
    """``first[i]``, ``first[i] + 1``, ... ``lens[i]`` long, for one i after the other: [total] int64."""
    begin = torch.cumsum(lens, 0) - lens
    return _each(first - begin, lens, total) + torch.arange(total, device=lens.device)


def _ceil_div(lens: Tensor, page_size: int) -> Tensor:
    return (lens + page_size - 1) // page_size


def _extend_cost(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, page_size: int, num_tokens: int
) -> Work:
    pages = num_tokens // page_size + seq_lens.shape[0]
    return Work(nbytes(prefix_lens, seq_lens, last_loc) + INT64 * (pages + num_tokens))


@kernel(meta=lambda num_tokens: meta_tensor(num_tokens), cost=_extend_cost, integer=True)
def alloc_extend_slots(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    page_size: int,
    num_tokens: int,
) -> Tensor:
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


@kernel(
    meta=lambda seq_lens: meta_tensor(seq_lens.shape[0]),
    cost=lambda seq_lens, last_loc: Work(nbytes(seq_lens, last_loc) + 2 * INT64 * seq_lens.shape[0]),
    integer=True,
)
def alloc_decode_slots(seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int) -> Tensor:
    """Slots [b] int64 of position seq_len - 1: behind ``last_loc``, or the first of the next free page."""
    old = last_loc.to(torch.int64) + 1
    if free_pages.shape[0] == 0:
        return old
    opens = (seq_lens - 1) % page_size == 0
    nth_free = (torch.cumsum(opens, 0) - 1).clamp(min=0, max=free_pages.shape[0] - 1)
    return torch.where(opens, free_pages[nth_free] * page_size, old)


def write_runs(table: Tensor, first: Tensor, lens: Tensor, slots: Tensor) -> None:
    """Writes ``slots`` to the flat ``table``: ``lens[i]`` of them from ``first[i]`` on."""
    table.scatter_(0, runs(first, lens, slots.shape[0]), slots.to(table.dtype))


class _Extend(NamedTuple):
    """What is read to write the rows of an extend batch of b requests."""

    req_pool_indices: Tensor
    prefix_tensors: Sequence[Tensor]
    prefix_pointers: Tensor
    prefix_lens: Tensor
    seq_lens: Tensor
    extend_lens: Tensor
    out_cache_loc: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.req_pool_indices, *self.prefix_tensors, *self[2:])


def _write_cost(req_to_token: Tensor, extend: _Extend) -> Work:
    slots = extend.out_cache_loc.shape[0] + sum(prefix.shape[0] for prefix in extend.prefix_tensors)
    return Work(nbytes(*extend.tensors()) + req_to_token.element_size() * slots)


@kernel(
    mutates=("req_to_token",),
    cost=_write_cost,
    footprint=lambda req_to_token, extend: (
        Access(req_to_token, write=True, rows=extend.req_pool_indices, lens=extend.seq_lens),
        *reads(*extend.tensors()),
    ),
    integer=True,
)
def _write_cache_indices(req_to_token: Tensor, extend: _Extend) -> None:
    table = req_to_token.view(-1)
    first = extend.req_pool_indices * req_to_token.shape[1]
    if extend.prefix_tensors:
        write_runs(table, first, extend.prefix_lens, torch.cat(list(extend.prefix_tensors)))
    write_runs(table, first + extend.prefix_lens, extend.extend_lens, extend.out_cache_loc)


def upload_prefix_pointers(prefix_tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """[b] int64 on the device: the address of each request's prefix, uploaded from pageable memory.

    Only a CUDA kernel reads through raw addresses; elsewhere the same copy carries zeros.
    """
    addresses = [tensor.data_ptr() if tensor.is_cuda else 0 for tensor in prefix_tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def write_cache_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    *,
    prefix_tensors: Sequence[Tensor],
    prefix_pointers: Tensor,
    prefix_lens: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    out_cache_loc: Tensor,
) -> None:
    """Writes the prefix and the new slots of every request of an extend batch into its row, in one launch.

    req_to_token [rows, max_context_len] int32; lengths and ``req_pool_indices`` [b]; ``prefix_tensors`` b
    tensors [prefix_len] int64, empty ones may be on any device; ``out_cache_loc`` [sum of extend_lens] int64.
    """
    prefixes = [tensor for tensor in prefix_tensors if tensor.shape[0]]
    lens = (prefix_lens, seq_lens, extend_lens)
    _write_cache_indices(req_to_token, req_pool_indices, prefixes, prefix_pointers, *lens, out_cache_loc)
