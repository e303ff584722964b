"""Everything between the qkv product and attention: norms of heads, rotary positions, the cache's write."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .declare import kernel, meta_tensor, nbytes, reads
from .dense import normalised
from .registry import Access, Work


class Projected(NamedTuple):
    """The qkv product of T tokens, and what becomes of it."""

    qkv: Tensor  # [T, (heads + 2 kv_heads) · d]
    positions: Tensor  # [T]
    cos_sin: Tensor  # [positions, d], the cosines of d/2 angles, then their sines
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
    eps: float
    out_cache_loc: Tensor  # [T], where keys and values are stored
    k_cache: Tensor  # [slots, kv_heads, d]
    v_cache: Tensor  # [slots, kv_heads, d]


def _meta(qkv: Tensor, k_cache: Tensor) -> Tensor:
    _, kv_heads, head_dim = k_cache.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    return meta_tensor(qkv.shape[0], heads, head_dim, dtype=qkv.dtype)


def _cost(projected: Projected) -> Work:
    qkv, positions, cos_sin, q_norm, k_norm, _, out_cache_loc, *_ = projected
    angles = positions.shape[0] * cos_sin.shape[1] * cos_sin.element_size()
    return Work(2 * nbytes(qkv) + angles + nbytes(positions, out_cache_loc, q_norm, k_norm))


def _footprint(projected: Projected) -> tuple[Access, ...]:
    qkv, positions, cos_sin, q_norm, k_norm, _, out_cache_loc, k_cache, v_cache = projected
    return (
        *reads(qkv, positions, out_cache_loc, q_norm, k_norm),
        Access(cos_sin, write=False, rows=positions),
        Access(k_cache, write=True, rows=out_cache_loc),
        Access(v_cache, write=True, rows=out_cache_loc),
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d]; element i turns together with element i + d/2 (arXiv 2104.09864, in halves)."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@kernel(mutates=("k_cache", "v_cache"), meta=_meta, cost=_cost, footprint=_footprint, triton="rope")
def rope_and_store_kv(projected: Projected) -> Tensor:
    """Splits the product, normalises and rotates q and k, stores k and v. Returns q [T, heads, d]."""
    qkv, positions, cos_sin, q_norm, k_norm, eps, out_cache_loc, k_cache, v_cache = projected
    _, kv_heads, head_dim = k_cache.shape
    rows = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    q, k, v = rows[:, : -2 * kv_heads], rows[:, -2 * kv_heads : -kv_heads], rows[:, -kv_heads:]
    q = q if q_norm is None else normalised(q, q_norm, eps)
    k = k if k_norm is None else normalised(k, k_norm, eps)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    k_cache.index_copy_(0, out_cache_loc, _rotated(k, cos, sin))
    v_cache.index_copy_(0, out_cache_loc, v)
    return _rotated(q, cos, sin)
