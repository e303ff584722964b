"""Filling the buffers that a captured graph reads."""

from __future__ import annotations

import torch
from torch import Tensor

from .declare import kernel, nbytes
from .registry import Work

INPUTS = ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc")


def _cost(static: Tensor, input_ids: Tensor, padded: int) -> Work:
    return Work(len(INPUTS) * (nbytes(input_ids) + padded * static.element_size()))


@kernel(mutates=("static",), cost=_cost, integer=True, triton="rows")
def stage_decode(
    static: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    padded: int,
) -> None:
    """Copies five inputs [b] int64 into the rows of ``static`` [5, capacity].

    Columns b to ``padded`` become harmless requests: token 0 at position 0, page-table row 0, length 1, slot 0.
    """
    b = input_ids.shape[0]
    static[:, :b] = torch.stack([input_ids, positions, req_pool_indices, seq_lens, out_cache_loc])
    static[:, b:padded] = 0
    static[INPUTS.index("seq_lens"), b:padded] = 1
