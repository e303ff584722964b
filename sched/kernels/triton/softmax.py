"""Attention of some rows to one block of the cache after another, in the precision that tensor cores add up in."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def begin(rows: tl.constexpr, dim: tl.constexpr):
    """The initial top [rows], weight [rows] and value [rows, dim]. The top is finite, so that a block that is masked
    for a whole row gives weights of 0."""
    top = tl.full([rows], -1e30, tl.float32)
    return top, tl.zeros([rows], tl.float32), tl.zeros([rows, dim], tl.float32)


@triton.jit
def attend(
    top,
    weight,
    value,
    q,
    k_cache,
    v_cache,
    places,
    seen,
    visible,
    at,
    width: tl.constexpr,
    scale,
    wide: tl.constexpr,
):
    """q [rows, dim] against the heads of the cache that begin at ``places`` [block], of which ``seen`` [block] are
    there and each row sees those that are ``visible`` [rows, block]. ``scale`` is in powers of two.

    The interpreter cannot compute with bfloat16, so ``wide`` makes everything float32.
    """
    mask = seen[:, None] & (at < width)[None, :]
    k = tl.load(k_cache + places[:, None] + at[None, :], mask=mask, other=0.0)
    v = tl.load(v_cache + places[:, None] + at[None, :], mask=mask, other=0.0)
    if wide:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores - higher[:, None])
    decay = tl.exp2(top - higher)
    value = value * decay[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
    return higher, weight * decay + tl.sum(shares, 1), value


def padded(head_dim: int) -> int:
    """Elements of a tile's row: tensor cores need 16 or more."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def block_of(cache: Tensor) -> int:
    """Positions of one block: 16 KiB of keys and as much of values, which the loop holds several times over."""
    size = 16384 // (padded(cache.shape[2]) * cache.element_size())
    return min(max(size, 16), 128)
