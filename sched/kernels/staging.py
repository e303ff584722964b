"""Filling the buffers that a captured graph reads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, reads
from .registry import Access, Work

INPUTS = ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc")


class _StageDecode(NamedTuple):
    static: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    padded: int

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        written = len(INPUTS) * self.padded * self.static.element_size()
        return Work(len(INPUTS) * nbytes(self.input_ids) + written)

    def footprint(self) -> tuple[Access, ...]:
        return (*reads(*self[1:-1]), Access(self.static, write=True))


@declared(
    "stage_decode(Tensor(a!) static, Tensor input_ids, Tensor positions, Tensor req_pool_indices, "
    "Tensor seq_lens, Tensor out_cache_loc, int padded) -> ()",
    _StageDecode,
    integer=True,
    triton="rows",
)
def stage_decode(
    static: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    padded: int,
) -> None:
    """Copies five inputs [b] int64 into the rows of ``static`` [5, capacity].

    Columns b to ``padded`` become harmless requests: token 0 at position 0, page-table row 0, length 1, slot 0.
    """
    b = input_ids.shape[0]
    static[:, :b] = torch.stack([input_ids, positions, req_pool_indices, seq_lens, out_cache_loc])
    static[:, b:padded] = 0
    static[INPUTS.index("seq_lens"), b:padded] = 1
