"""Rows of a batch: token embeddings, positions, each request's last token, and the inputs of a captured graph."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arrays import ONE, ZERO, array_of, kept_array, tensor_of
from .declare import INT64, Access, Work, Written, kernel, meta_tensor, nbytes


def _rows_meta(ids: Tensor, table: Tensor) -> Tensor:
    return meta_tensor(ids.shape[0], table.shape[1], dtype=table.dtype)


def _rows_work(ids: Tensor, table: Tensor) -> Work:
    """One row of the ``table`` is read and written for each of ``ids``."""
    return Work(nbytes(ids) + 2 * ids.shape[0] * table.shape[1] * table.element_size())


@kernel(
    meta=lambda input_ids, table: _rows_meta(input_ids, table),
    cost=lambda input_ids, table: _rows_work(input_ids, table),
    rows={"table": "input_ids"},
)
def embedding(input_ids: Tensor, table: Tensor) -> Tensor:
    """input_ids [T] int64, table [vocab, n] → [T, n]."""
    return table.index_select(0, input_ids)


@kernel(
    meta=lambda seq_lens: meta_tensor(seq_lens.shape[0]),
    cost=lambda seq_lens: Work(nbytes(seq_lens) + INT64 * seq_lens.shape[0]),
)
def decode_positions(seq_lens: Tensor) -> Tensor:
    """Position of each request's newest token: seq_lens [b] → [b] int64, never negative."""
    if seq_lens.is_cpu:
        return tensor_of(np.maximum(array_of(seq_lens) - ONE, ZERO))
    return (seq_lens.to(torch.int64) - 1).clamp_(min=0)


@kernel(
    meta=lambda num_tokens: meta_tensor(num_tokens),
    cost=lambda seq_lens, extend_lens, num_tokens: Work(nbytes(seq_lens, extend_lens) + INT64 * num_tokens),
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
)
def last_tokens(hidden: Tensor, extend_lens: Tensor) -> Tensor:
    """hidden [T, n], extend_lens [b] → [b, n]: the row of each request's last token."""
    return hidden.index_select(0, torch.cumsum(extend_lens, 0) - 1)


class DecodeInputs(NamedTuple):
    """The inputs of a decode, [b] int64 each, in the order of a graph's buffers."""

    input_ids: Tensor
    positions: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor


INPUTS = DecodeInputs._fields


@kernel(
    cost=lambda static, input_ids, padded: Work(
        len(INPUTS) * (nbytes(input_ids) + padded * static.element_size())
    ),
)
def stage_decode(static: Written, inputs: DecodeInputs, padded: int) -> None:
    """Copies the inputs into the rows of ``static`` [5, capacity].

    Columns b to ``padded`` become harmless requests: token 0 at position 0, page-table row 0, length 1, slot 0.
    """
    # NumPy copies a row in a quarter of torch's time.
    rows, given = (kept_array(static), map(array_of, inputs)) if static.is_cpu else (static, inputs)
    b = inputs.input_ids.shape[0]
    for row, values in zip(rows, given, strict=True):
        row[:b] = values
    if b < padded:
        rows[:, b:padded] = 0
        rows[INPUTS.index("seq_lens"), b:padded] = 1


@kernel(cost=lambda source: Work(2 * nbytes(source)))
def stage_rows(static: Written, source: Tensor, padded: int) -> None:
    """Copies integer rows [n, ...] to the first rows of ``static``; rows n to ``padded`` become zeros."""
    static[: source.shape[0]] = source
    static[source.shape[0] : padded] = 0


@kernel(
    cost=lambda input_ids: Work(2 * nbytes(input_ids)),
    footprint=lambda input_ids, tokens: (
        Access(input_ids, write=True),
        Access(tokens, write=False, rows=-input_ids[input_ids < 0]),
    ),
)
def resolve_negative(input_ids: Written, tokens: Tensor) -> None:
    """Replaces every v < 0 of input_ids [T] int64 by ``tokens[-v]``, in place; reads all T of them."""
    input_ids.copy_(torch.where(input_ids < 0, tokens[(-input_ids).clamp_(min=0)], input_ids))


@kernel(cost=lambda condition: Work(nbytes(condition)))
def assert_all(condition: Tensor) -> None:
    """Fails on the device unless ``condition`` [] bool holds. The host does not wait for it."""
    torch._assert_async(condition)
