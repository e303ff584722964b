"""The gated activation of the feed-forward block."""

from __future__ import annotations

from torch import Tensor

from .declare import kernel, meta_tensor, nbytes
from .invariant import silu, widened
from .registry import Work


@kernel(
    meta=lambda gate_up: meta_tensor(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype),
    cost=lambda gate_up: Work(nbytes(gate_up) * 3 // 2),
    triton="activation",
)
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [rows, 2n] → silu(first half) · second half, [rows, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(widened(gate).contiguous()).to(gate_up.dtype) * up
