"""RMSNorm, a program for each row, and the gated activation, in pieces of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def normalised(x, weight, eps, width, dtype: tl.constexpr):
    """x [..., block] float32 of ``width`` elements along its last axis, zeros behind them, rounded as torch's are."""
    mean = tl.sum(x * x, axis=-1, keep_dims=True) / width
    return (x * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32) * weight


@triton.jit
def _rms_norm(x, residual, weight, out, eps, width: tl.constexpr, block: tl.constexpr) -> None:
    """Without ``residual`` the norm of x; with it x is added to it first."""
    at = tl.arange(0, block)
    valid = at < width
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * width + at, mask=valid, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * width + at, mask=valid, other=0.0).to(tl.float32)
        value = value.to(residual.dtype.element_ty).to(tl.float32)
        tl.store(residual + row * width + at, value.to(residual.dtype.element_ty), mask=valid)
    scale = tl.load(weight + at, mask=valid, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + row * width + at, normalised(value, scale, eps, width, dtype).to(dtype), mask=valid)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(max(block // 512, 1), 16)
        _rms_norm[(rows,)](x, residual, weight, out, eps, width, block, num_warps=warps)
    return out


def rms_norm(x, weight, eps):
    return _launch(x, None, weight, eps)


def add_rms_norm(x, residual, weight, eps):
    return _launch(x, residual, weight, eps)


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


def silu_and_mul(gate_up):
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _silu_and_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block)
    return out
