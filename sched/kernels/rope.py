"""Everything between the qkv product and attention: norms of heads, rotary positions, the cache's write."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .norm import normalised
from .registry import Access, Work


class _RopeAndStoreKv(NamedTuple):
    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    out_cache_loc: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def meta(self) -> torch.Tensor:
        _, kv_heads, head_dim = self.k_cache.shape
        heads = self.qkv.shape[1] // head_dim - 2 * kv_heads
        return nothing(self.qkv.shape[0], heads, head_dim, dtype=self.qkv.dtype)

    def cost(self) -> Work:
        angles = self.positions.shape[0] * self.cos_sin.shape[1] * self.cos_sin.element_size()
        rest = nbytes(self.positions, self.out_cache_loc, self.q_norm, self.k_norm)
        return Work(2 * nbytes(self.qkv) + angles + rest)

    def footprint(self) -> tuple[Access, ...]:
        return (
            *reads(self.qkv, self.positions, self.out_cache_loc, self.q_norm, self.k_norm),
            Access(self.cos_sin, write=False, rows=self.positions),
            Access(self.k_cache, write=True, rows=self.out_cache_loc),
            Access(self.v_cache, write=True, rows=self.out_cache_loc),
        )


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, d]; element i turns together with element i + d/2 (arXiv 2104.09864, in halves)."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@declared(
    "rope_and_store_kv(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, "
    "float eps, Tensor out_cache_loc, Tensor(a!) k_cache, Tensor(b!) v_cache) -> Tensor",
    _RopeAndStoreKv,
    triton="rope",
)
def rope_and_store_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    out_cache_loc: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Splits qkv [T, (heads + 2 kv_heads) · d], normalises and rotates q and k, stores k and v.

    ``cos_sin`` [positions, d] holds the cosines of d/2 angles, then their sines. Caches are
    [slots, kv_heads, d]; token t goes to slot ``out_cache_loc[t]``. Returns q [T, heads, d].
    """
    _, kv_heads, head_dim = k_cache.shape
    rows = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    q, k, v = rows[:, : -2 * kv_heads], rows[:, -2 * kv_heads : -kv_heads], rows[:, -kv_heads:]
    q = q if q_norm is None else normalised(q, q_norm, eps)
    k = k if k_norm is None else normalised(k, k_norm, eps)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    k_cache.index_copy_(0, out_cache_loc, _rotated(k, cos, sin))
    v_cache.index_copy_(0, out_cache_loc, v)
    return _rotated(q, cos, sin)
