"""Kernels of KV bookkeeping: slots of a batch's new tokens, its rows of req_to_token, and its lengths.

Each is one launch, and none waits for the device: sizes come from shapes and host integers. Upstream has a small kernel
for each part; ``place_decode`` and ``place_extend`` do all parts of a step in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arrays import ONE, ZERO, array_of, clipped, kept_array, row_starts, tensor_of
from .declare import INT64, Access, Work, Written, kernel, meta_tensor, nbytes, reads, total_length

_INT32_ONE = np.array(1, dtype=np.int32)


def runs(first: Tensor, lens: Tensor, total: int) -> Tensor:
    """``first[i]``, ``first[i] + 1``, ... ``lens[i]`` long, for one i after the other: [total] int64."""
    shifts = first - (torch.cumsum(lens, 0) - lens)
    return torch.repeat_interleave(shifts, lens, output_size=total) + torch.arange(total, device=lens.device)


@kernel(
    meta=lambda num_tokens: meta_tensor(num_tokens),
    cost=lambda prefix_lens, seq_lens, last_loc, page_size, num_tokens: Work(
        nbytes(prefix_lens, seq_lens, last_loc)
        + INT64 * (num_tokens // page_size + seq_lens.shape[0] + num_tokens)
    ),
)
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
    held, ends = ((length + page_size - 1) // page_size for length in (prefix_lens, seq_lens))
    opened = ends - held
    each = partial(torch.repeat_interleave, repeats=lens, output_size=num_tokens)
    nth_free = page + each(torch.cumsum(opened, 0) - opened - held)
    new = free_pages[nth_free.clamp(min=0, max=free_pages.shape[0] - 1)] * page_size + position % page_size
    return torch.where(page < each(held), old, new)


@kernel(
    meta=lambda seq_lens: meta_tensor(seq_lens.shape[0]),
    cost=lambda seq_lens, last_loc: Work(nbytes(seq_lens, last_loc) + 2 * INT64 * seq_lens.shape[0]),
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


@kernel(
    cost=lambda req_to_token, extend: Work(
        nbytes(extend.req_pool_indices, *extend.prefix_tensors, *extend[2:])
        + req_to_token.element_size()
        * sum(slots.shape[0] for slots in (extend.out_cache_loc, *extend.prefix_tensors))
    ),
    rows={"req_to_token": "req_pool_indices, seq_lens"},
)
def _write_cache_indices(req_to_token: Written, extend: _Extend) -> None:
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


@kernel(
    meta=lambda seq_lens, orig_seq_lens: (
        meta_tensor(seq_lens.shape[0]),
        meta_tensor(seq_lens.shape[0]),
        meta_tensor(seq_lens.shape[0], dtype=orig_seq_lens.dtype),
    ),
    cost=lambda req_to_token, req_pool_indices, seq_lens, orig_seq_lens: Work(
        nbytes(req_pool_indices)
        + 2 * nbytes(seq_lens, orig_seq_lens)
        + 2 * (INT64 + req_to_token.element_size()) * seq_lens.shape[0]
    ),
    rows={"req_to_token": "req_pool_indices"},
)
def place_decode(
    req_to_token: Written,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    orig_seq_lens: Tensor,
    free_pages: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One more token for each request: its slot [b] int64, written to the row at position ``seq_lens``, and both
    lengths advanced, as new tensors. Pages are taken from the front of ``free_pages``."""
    if page_size == 1 and free_pages.is_cpu:
        lens = array_of(seq_lens)
        pages = free_pages.numpy()[: len(lens)].copy()
        kept_array(req_to_token)[kept_array(req_pool_indices), lens] = pages
        return tensor_of(pages), tensor_of(lens + ONE), tensor_of(array_of(orig_seq_lens) + _INT32_ONE)
    if page_size == 1:
        slots = free_pages[: seq_lens.shape[0]].clone()
    else:
        last_loc = req_to_token[req_pool_indices, seq_lens - 1]
        slots = alloc_decode_slots(seq_lens + 1, last_loc, free_pages, page_size)
    req_to_token[req_pool_indices, seq_lens] = slots.to(req_to_token.dtype)
    return slots, seq_lens + 1, orig_seq_lens + 1


class NewPrompts(NamedTuple):
    """The new tokens of b requests, and the slots of their cached prefixes."""

    req_to_token: Written  # [rows, context] int32
    req_pool_indices: Tensor  # [b]
    prefix: Tensor  # [sum of prefix_lens] int64, the slots of the prefixes, one request after the other
    prefix_lens: Tensor  # [b]
    seq_lens: Tensor  # [b]
    free_pages: Tensor
    page_size: int
    num_tokens: int  # the sum of seq_lens - prefix_lens


@kernel(
    meta=lambda num_tokens: meta_tensor(num_tokens),
    cost=lambda req_to_token, req_pool_indices, prefix, prefix_lens, seq_lens, page_size, num_tokens: Work(
        nbytes(req_pool_indices, prefix, prefix_lens, seq_lens)
        + INT64 * (num_tokens // page_size + seq_lens.shape[0] + num_tokens)
        + req_to_token.element_size() * (prefix.shape[0] + num_tokens)
    ),
    rows={"req_to_token": "req_pool_indices"},
)
def place_extend(prompts: NewPrompts) -> Tensor:
    """Slots [num_tokens] int64 of positions [prefix_len, seq_len) of each request; its row gets prefix and slots. Pages
    are taken from the front of ``free_pages``."""
    req_to_token, req_pool_indices, prefix, prefix_lens, seq_lens, free_pages, page_size, num_tokens = prompts
    ends = torch.cumsum(prefix_lens, 0)
    last_loc = torch.full_like(prefix_lens, -1)
    if prefix.shape[0]:
        last_loc = torch.where(prefix_lens > 0, prefix[(ends - 1).clamp_(min=0)], last_loc)
    slots: Tensor = alloc_extend_slots(prefix_lens, seq_lens, last_loc, free_pages, page_size, num_tokens)
    table, first = req_to_token.view(-1), req_pool_indices * req_to_token.shape[1]
    write_runs(table, first, prefix_lens, prefix)
    write_runs(table, first + prefix_lens, seq_lens - prefix_lens, slots)
    return slots


def page_bytes(req_to_token: Tensor, seq_lens: Tensor) -> int:
    """Bytes that a copy of the requests' page-table entries reads and writes."""
    return 2 * req_to_token.element_size() * total_length(seq_lens)


def copy_rows(
    pages: Tensor, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, max_seq_len: int
) -> None:
    """Implements ``copy_pages``, for kernels that do it among other things."""
    if not pages.is_cpu:  # the host does not know the lengths; entries beyond them are never read
        pages[req_pool_indices, :max_seq_len] = req_to_token[req_pool_indices, :max_seq_len]
        return
    context = req_to_token.shape[1]
    begins = clipped(row_starts(req_to_token), kept_array(req_pool_indices))
    ends = begins + np.minimum(np.maximum(array_of(seq_lens), ZERO), np.array(context))
    # A slice of a memoryview is copied in half of the time that one of an array takes.
    target, source = kept_array(pages).reshape(-1).data, kept_array(req_to_token).reshape(-1).data
    for entries in map(slice, begins.tolist(), ends.tolist()):
        target[entries] = source[entries]


@kernel(
    cost=lambda req_to_token, req_pool_indices, seq_lens: Work(
        nbytes(req_pool_indices, seq_lens) + page_bytes(req_to_token, seq_lens)
    ),
    rows={"req_to_token": "req_pool_indices", "pages": "req_pool_indices"},
    fixed_cost=False,
)
def copy_pages(
    pages: Written, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, max_seq_len: int
) -> None:
    """Copies the first ``seq_lens`` entries of each row of the page table to the same place in ``pages``."""
    copy_rows(pages, req_to_token, req_pool_indices, seq_lens, max_seq_len)


def _inputs_footprint(
    tokens: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, req_to_token: Tensor, pages: Tensor | None
) -> tuple[Access, ...]:
    rows = req_pool_indices
    gathered = (*reads(rows, seq_lens), Access(tokens, write=False, rows=rows))
    if pages is None:
        return gathered
    return (*gathered, Access(req_to_token, write=False, rows=rows), Access(pages, write=True, rows=rows))


@kernel(
    meta=lambda seq_lens: (meta_tensor(seq_lens.shape[0]), meta_tensor(seq_lens.shape[0])),
    cost=lambda req_pool_indices, seq_lens, req_to_token, pages: Work(
        nbytes(req_pool_indices, seq_lens)
        + 3 * INT64 * seq_lens.shape[0]
        + (0 if pages is None else page_bytes(req_to_token, seq_lens))
    ),
    footprint=_inputs_footprint,
    fixed_cost=False,
)
def decode_inputs(
    tokens: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    pages: Written | None,
    max_seq_len: int,
) -> tuple[Tensor, Tensor]:
    """Makes the inputs of a decode that the schedule stream may change meanwhile, in one launch: input_ids
    ``tokens[req_pool_indices]`` and positions ``seq_lens - 1``, [b] int64 each, and, with ``pages``, a copy of the rows
    of the page table (``copy_pages``)."""
    if pages is not None:
        copy_rows(pages, req_to_token, req_pool_indices, seq_lens, max_seq_len)
    if not tokens.is_cpu:
        return tokens[req_pool_indices], (seq_lens - 1).clamp_(min=0)
    positions = np.maximum(array_of(seq_lens) - ONE, ZERO)
    return tensor_of(kept_array(tokens)[kept_array(req_pool_indices)]), tensor_of(positions)
