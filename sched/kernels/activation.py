"""The gated activation of the feed-forward block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .invariant import silu, widened
from .registry import Access, Work


class _SiluAndMul(NamedTuple):
    gate_up: torch.Tensor

    def meta(self) -> torch.Tensor:
        rows, width = self.gate_up.shape
        return nothing(rows, width // 2, dtype=self.gate_up.dtype)

    def cost(self) -> Work:
        return Work(nbytes(self.gate_up) * 3 // 2)

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.gate_up)


@declared("silu_and_mul(Tensor gate_up) -> Tensor", _SiluAndMul, triton="activation")
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2n] → silu(first half) · second half, [rows, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(widened(gate).contiguous()).to(gate_up.dtype) * up
