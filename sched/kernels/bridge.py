"""Kernels between one step's tokens and the next step's input."""

from __future__ import annotations

import torch
from torch import Tensor

from .declare import INT64, kernel, meta_tensor, nbytes, reads
from .placement import copy_rows, page_bytes
from .registry import Access, Work


@kernel(
    mutates=("input_ids",),
    cost=lambda input_ids: Work(2 * nbytes(input_ids)),
    footprint=lambda input_ids, tokens: (
        Access(input_ids, write=True),
        Access(tokens, write=False, rows=-input_ids[input_ids < 0]),
    ),
    integer=True,
    triton="rows",
)
def resolve_negative(input_ids: Tensor, tokens: Tensor) -> None:
    """Replaces every v < 0 of input_ids [T] int64 by ``tokens[-v]``, in place; reads all T of them."""
    input_ids.copy_(torch.where(input_ids < 0, tokens[(-input_ids).clamp_(min=0)], input_ids))


@kernel(cost=lambda condition: Work(nbytes(condition)), integer=True)
def assert_all(condition: Tensor) -> None:
    """Fails on the device unless ``condition`` [] bool holds. The host does not wait for it."""
    torch._assert_async(condition)


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
    return tokens[req_pool_indices], (seq_lens - 1).clamp_(min=0)
