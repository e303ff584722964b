"""The dense parts of a decoder layer: products with the weights, RMSNorm (arXiv 1910.07467), the gated activation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .declare import kernel, meta_like, meta_tensor, nbytes
from .invariant import halving_sum, silu, tiled_matmul, widened
from .registry import Work


def _meta(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    return meta_tensor(x.shape[0], weight.shape[1], dtype=out_dtype)


def _work(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Work:
    rows, (k, m) = x.shape[0], weight.shape
    return Work(nbytes(x, weight, bias) + rows * m * out_dtype.itemsize, 2 * rows * k * m, "gemm")


@kernel(meta=_meta, cost=_work)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [rows, k] · weight [k, m] + bias [m] → [rows, m] of ``out_dtype``."""
    if x.device.type == "cpu":
        product = tiled_matmul(x, weight)
        return (product if bias is None else product + bias).to(out_dtype)
    return multiplied(x, weight, bias, out_dtype)


@kernel(meta=_meta, cost=lambda x, weight, out_dtype: _work(x, weight, None, out_dtype))
def linear_columns(
    x: Tensor, weight: Tensor, columns: Sequence[int], width: int, out_dtype: torch.dtype
) -> Tensor:
    """x [rows, k] · some columns [k, m] of a weight that is ``width`` wide → [rows, m] of ``out_dtype``: those columns
    of the whole product. ``columns``: begin and end of each run of them, in order.

    A library chooses the order of its sums by the shape of the product, so on the CPU the whole
    product is computed.
    """
    if x.device.type != "cpu":
        return multiplied(x, weight, None, out_dtype)
    places = torch.cat([torch.arange(*run) for run in zip(columns[::2], columns[1::2], strict=True)])
    whole = weight.new_zeros(weight.shape[0], width)
    whole[:, places] = weight
    return tiled_matmul(x, whole)[:, places].to(out_dtype)


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``linear`` by the library of a device, which sums in a wider type than x: one launch, or two with a bias if the
    result is widened."""
    if out_dtype == x.dtype:
        return x @ weight if bias is None else torch.addmm(bias, x, weight)
    product = _widening(x, weight, out_dtype)
    return product if bias is None else product + bias


def _widening(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:  # cuda-only
    """float32 of 16-bit floats."""
    return torch.mm(x, weight, out_dtype=out_dtype)


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Last dimension scaled to a root mean square of 1, then by ``weight``."""
    wide = widened(x)
    mean = halving_sum(wide * wide) / x.shape[-1]
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight


@kernel(
    meta=lambda x: meta_like(x), cost=lambda x, weight: Work(2 * nbytes(x) + nbytes(weight)), triton="dense"
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, n], weight [n] → [rows, n]."""
    return normalised(x, weight, eps)


@kernel(
    mutates=("residual",),
    meta=lambda x: meta_like(x),
    cost=lambda x, residual, weight: Work(2 * nbytes(x, residual) + nbytes(weight)),
    triton="dense",
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x [rows, n] to the residual in place and returns the residual's norm."""
    residual.add_(x)
    return normalised(residual, weight, eps)


@kernel(
    meta=lambda gate_up: meta_tensor(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype),
    cost=lambda gate_up: Work(nbytes(gate_up) * 3 // 2),
    triton="dense",
)
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [rows, 2n] → silu(first half) · second half, [rows, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(widened(gate).contiguous()).to(gate_up.dtype) * up
