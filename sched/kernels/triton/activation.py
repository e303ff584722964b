"""The gated activation, in pieces of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_and_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    valid = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=valid, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * width + at, (silu * up).to(dtype), mask=valid)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _silu_and_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block)
    return out
