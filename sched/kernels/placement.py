"""The bookkeeping of a whole step in one launch: slots of the new tokens, page table, lengths.

``allocation`` does the same work as upstream does it, with one small kernel for each part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .allocation import alloc_decode_slots, alloc_extend_slots, write_runs
from .declare import INT64, kernel, meta_tensor, nbytes, reads, total_length
from .registry import Access, Work


def _decode_meta(seq_lens: Tensor, orig_seq_lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b = seq_lens.shape[0]
    return meta_tensor(b), meta_tensor(b), meta_tensor(b, dtype=orig_seq_lens.dtype)


def _decode_cost(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, orig_seq_lens: Tensor
) -> Work:
    per_row = 2 * INT64 + 2 * req_to_token.element_size()
    lens = 2 * nbytes(seq_lens, orig_seq_lens)
    return Work(nbytes(req_pool_indices) + lens + per_row * seq_lens.shape[0])


@kernel(
    mutates=("req_to_token",),
    meta=_decode_meta,
    cost=_decode_cost,
    footprint=lambda req_to_token, req_pool_indices, seq_lens, orig_seq_lens, free_pages: (
        Access(req_to_token, write=True, rows=req_pool_indices),
        *reads(req_pool_indices, seq_lens, orig_seq_lens, free_pages),
    ),
    integer=True,
    triton="placement",
)
def place_decode(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    orig_seq_lens: Tensor,
    free_pages: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One more token for each request: its slot [b] int64, written to the row at position ``seq_lens``, and both
    lengths advanced, as new tensors. Pages are taken from the front of ``free_pages``."""
    if page_size == 1 and free_pages.is_cpu:
        pages = free_pages.numpy()[: seq_lens.shape[0]].copy()
        return _place_slots(req_to_token, req_pool_indices, seq_lens, orig_seq_lens, pages)
    if page_size == 1:
        slots = free_pages[: seq_lens.shape[0]].clone()
    else:
        last_loc = req_to_token[req_pool_indices, seq_lens - 1]
        slots = alloc_decode_slots(seq_lens + 1, last_loc, free_pages, page_size)
    req_to_token[req_pool_indices, seq_lens] = slots.to(req_to_token.dtype)
    return slots, seq_lens + 1, orig_seq_lens + 1


def _place_slots(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    orig_seq_lens: Tensor,
    slots: NDArray[np.int64],
) -> tuple[Tensor, Tensor, Tensor]:
    """``place_decode`` on the host, where NumPy computes with few elements in a third of torch's time."""
    lens = seq_lens.numpy()
    req_to_token.numpy()[req_pool_indices.numpy(), lens] = slots
    orig_longer = torch.from_numpy(orig_seq_lens.numpy() + 1)
    return torch.from_numpy(slots), torch.from_numpy(lens + 1), orig_longer


class NewPrompts(NamedTuple):
    """The new tokens of b requests, and the slots of their cached prefixes."""

    req_to_token: Tensor  # [rows, context] int32
    req_pool_indices: Tensor  # [b]
    prefix: Tensor  # [sum of prefix_lens] int64, the slots of the prefixes, one request after the other
    prefix_lens: Tensor  # [b]
    seq_lens: Tensor  # [b]
    free_pages: Tensor
    page_size: int
    num_tokens: int  # the sum of seq_lens - prefix_lens


def _extend_cost(prompts: NewPrompts) -> Work:
    req_to_token, req_pool_indices, prefix, prefix_lens, seq_lens, _, page_size, num_tokens = prompts
    pages = num_tokens // page_size + seq_lens.shape[0]
    written = req_to_token.element_size() * (prefix.shape[0] + num_tokens)
    read = nbytes(req_pool_indices, prefix, prefix_lens, seq_lens)
    return Work(read + INT64 * (pages + num_tokens) + written)


@kernel(
    mutates=("req_to_token",),
    meta=lambda num_tokens: meta_tensor(num_tokens),
    cost=_extend_cost,
    footprint=lambda prompts: (
        Access(prompts.req_to_token, write=True, rows=prompts.req_pool_indices),
        *reads(*prompts[1:-2]),
    ),
    integer=True,
    triton="placement",
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
    begins = req_pool_indices.numpy() * context
    ends = begins + np.minimum(np.maximum(seq_lens.numpy(), 0), context)
    # A slice of a memoryview is copied in half of the time that one of an array takes.
    target, source = pages.numpy().reshape(-1).data, req_to_token.numpy().reshape(-1).data
    for entries in map(slice, begins.tolist(), ends.tolist()):
        target[entries] = source[entries]


def _copy_cost(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> Work:
    return Work(nbytes(req_pool_indices, seq_lens) + page_bytes(req_to_token, seq_lens))


@kernel(
    mutates=("pages",),
    cost=_copy_cost,
    footprint=lambda pages, req_to_token, req_pool_indices, seq_lens: (
        *reads(req_pool_indices, seq_lens),
        Access(req_to_token, write=False, rows=req_pool_indices),
        Access(pages, write=True, rows=req_pool_indices),
    ),
    integer=True,
    fixed_cost=False,
    triton="placement",
)
def copy_pages(
    pages: Tensor, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, max_seq_len: int
) -> None:
    """Copies the first ``seq_lens`` entries of each row of the page table to the same place in ``pages``."""
    copy_rows(pages, req_to_token, req_pool_indices, seq_lens, max_seq_len)


def _inputs_cost(
    req_pool_indices: Tensor, seq_lens: Tensor, req_to_token: Tensor, pages: Tensor | None
) -> Work:
    copied = 0 if pages is None else page_bytes(req_to_token, seq_lens)
    return Work(nbytes(req_pool_indices, seq_lens) + 3 * INT64 * seq_lens.shape[0] + copied)


def _inputs_footprint(
    tokens: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, req_to_token: Tensor, pages: Tensor | None
) -> tuple[Access, ...]:
    rows = req_pool_indices
    gathered = (*reads(rows, seq_lens), Access(tokens, write=False, rows=rows))
    if pages is None:
        return gathered
    return (*gathered, Access(req_to_token, write=False, rows=rows), Access(pages, write=True, rows=rows))


@kernel(
    mutates=("pages",),
    meta=lambda seq_lens: (meta_tensor(seq_lens.shape[0]), meta_tensor(seq_lens.shape[0])),
    cost=_inputs_cost,
    footprint=_inputs_footprint,
    integer=True,
    fixed_cost=False,
    triton="placement",
)
def decode_inputs(
    tokens: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    pages: Tensor | None,
    max_seq_len: int,
) -> tuple[Tensor, Tensor]:
    """Makes the inputs of a decode that the schedule stream may change meanwhile, in one launch: input_ids
    ``tokens[req_pool_indices]`` and positions ``seq_lens - 1``, [b] int64 each, and, with ``pages``, a copy of the rows
    of the page table (``copy_pages``)."""
    if pages is not None:
        copy_rows(pages, req_to_token, req_pool_indices, seq_lens, max_seq_len)
    if not tokens.is_cpu:
        return tokens[req_pool_indices], (seq_lens - 1).clamp_(min=0)
    input_ids, positions = tokens.numpy()[req_pool_indices.numpy()], np.maximum(seq_lens.numpy() - 1, 0)
    return torch.from_numpy(input_ids), torch.from_numpy(positions)
