"""Selecting and numbering the rows of a batch: token embeddings, positions, and each request's last token."""

from __future__ import annotations

import torch
from torch import Tensor

from .declare import INT64, kernel, meta_tensor, nbytes, reads
from .registry import Access, Work


def _rows_meta(ids: Tensor, table: Tensor) -> Tensor:
    return meta_tensor(ids.shape[0], table.shape[1], dtype=table.dtype)


def _rows_work(ids: Tensor, table: Tensor) -> Work:
    """One row of the ``table`` is read and written for each of ``ids``."""
    return Work(nbytes(ids) + 2 * ids.shape[0] * table.shape[1] * table.element_size())


@kernel(
    meta=lambda input_ids, table: _rows_meta(input_ids, table),
    cost=lambda input_ids, table: _rows_work(input_ids, table),
    footprint=lambda input_ids, table: (*reads(input_ids), Access(table, write=False, rows=input_ids)),
)
def embedding(input_ids: Tensor, table: Tensor) -> Tensor:
    """input_ids [T] int64, table [vocab, n] → [T, n]."""
    return table.index_select(0, input_ids)


@kernel(
    meta=lambda seq_lens: meta_tensor(seq_lens.shape[0]),
    cost=lambda seq_lens: Work(nbytes(seq_lens) + INT64 * seq_lens.shape[0]),
    integer=True,
    triton="rows",
)
def decode_positions(seq_lens: Tensor) -> Tensor:
    """Position of each request's newest token: seq_lens [b] → [b] int64, never negative."""
    return (seq_lens.to(torch.int64) - 1).clamp_(min=0)


@kernel(
    meta=lambda num_tokens: meta_tensor(num_tokens),
    cost=lambda seq_lens, extend_lens, num_tokens: Work(nbytes(seq_lens, extend_lens) + INT64 * num_tokens),
    integer=True,
    triton="rows",
)
def extend_positions(seq_lens: Tensor, extend_lens: Tensor, num_tokens: int) -> Tensor:
    """Positions of the last ``extend_lens`` [b] tokens of each request, one request after the other.

    ``num_tokens`` is the sum of ``extend_lens``, as the host knows it → [num_tokens] int64.
    """
    shifts = seq_lens.to(torch.int64) - torch.cumsum(extend_lens, 0)
    index = torch.arange(num_tokens, device=seq_lens.device)
    return shifts.repeat_interleave(extend_lens, output_size=num_tokens) + index


@kernel(
    meta=lambda hidden, extend_lens: _rows_meta(extend_lens, hidden),
    cost=lambda hidden, extend_lens: _rows_work(extend_lens, hidden),
    triton="rows",
)
def last_tokens(hidden: Tensor, extend_lens: Tensor) -> Tensor:
    """hidden [T, n], extend_lens [b] → [b, n]: the row of each request's last token."""
    return hidden.index_select(0, torch.cumsum(extend_lens, 0) - 1)
