"""The parts of a decoder layer besides attention: products with the weights, RMSNorm (arXiv 1910.07467), the gated
activation, and what lies between the qkv product and attention: norms of heads, rotary positions, the cache's write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .compiled import normalised_on_host, rotated_on_host
from .declare import Work, Written, kernel, meta_like, meta_tensor, nbytes
from .invariant import halving_sum, silu, tiled_matmul, widened


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
    if x.device.type == "cpu" and (compiled := normalised_on_host(x, weight, eps)) is not None:
        return compiled
    wide = widened(x)
    mean = halving_sum(wide * wide) / x.shape[-1]
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight


@kernel(meta=lambda x: meta_like(x), cost=lambda x, weight: Work(2 * nbytes(x) + nbytes(weight)))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, n], weight [n] → [rows, n]."""
    return normalised(x, weight, eps)


@kernel(
    meta=lambda x: meta_like(x),
    cost=lambda x, residual, weight: Work(2 * nbytes(x, residual) + nbytes(weight)),
)
def add_rms_norm(x: Tensor, residual: Written, weight: Tensor, eps: float) -> Tensor:
    """Adds x [rows, n] to the residual in place and returns the residual's norm."""
    residual.add_(x)
    return normalised(residual, weight, eps)


@kernel(
    meta=lambda gate_up: meta_tensor(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype),
    cost=lambda gate_up: Work(nbytes(gate_up) * 3 // 2),
)
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [rows, 2n] → silu(first half) · second half, [rows, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(widened(gate).contiguous()).to(gate_up.dtype) * up


class Projected(NamedTuple):
    """The qkv product of T tokens, and what becomes of it."""

    qkv: Tensor  # [T, (heads + 2 kv_heads) · d]
    positions: Tensor  # [T]
    cos_sin: Tensor  # [positions, d], the cosines of d/2 angles, then their sines
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
    eps: float
    out_cache_loc: Tensor  # [T], where keys and values are stored
    k_cache: Written  # [slots, kv_heads, d]
    v_cache: Written  # [slots, kv_heads, d]


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, d], cos_sin [T, d]; element i turns together with element i + d/2 (arXiv 2104.09864, in halves)."""
    if x.device.type == "cpu" and (compiled := rotated_on_host(x, cos_sin)) is not None:
        return compiled
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@kernel(
    meta=lambda qkv, k_cache: meta_tensor(
        qkv.shape[0],
        qkv.shape[1] // k_cache.shape[2] - 2 * k_cache.shape[1],
        k_cache.shape[2],
        dtype=qkv.dtype,
    ),
    cost=lambda qkv, positions, cos_sin, q_norm, k_norm, out_cache_loc: Work(
        2 * nbytes(qkv)
        + positions.shape[0] * cos_sin.shape[1] * cos_sin.element_size()
        + nbytes(positions, out_cache_loc, q_norm, k_norm)
    ),
    rows={"cos_sin": "positions", "k_cache": "out_cache_loc", "v_cache": "out_cache_loc"},
)
def rope_and_store_kv(projected: Projected) -> Tensor:
    """Splits the product, normalises and rotates q and k, stores k and v. Returns q [T, heads, d]."""
    qkv, positions, cos_sin, q_norm, k_norm, eps, out_cache_loc, k_cache, v_cache = projected
    _, kv_heads, head_dim = k_cache.shape
    rows = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    q, k, v = rows[:, : -2 * kv_heads], rows[:, -2 * kv_heads : -kv_heads], rows[:, -kv_heads:]
    q = q if q_norm is None else normalised(q, q_norm, eps)
    k = k if k_norm is None else normalised(k, k_norm, eps)
    angles = cos_sin.index_select(0, positions)
    k_cache.index_copy_(0, out_cache_loc, rotated(k, angles))
    v_cache.index_copy_(0, out_cache_loc, v)
    return rotated(q, angles)
