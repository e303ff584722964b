"""Arithmetic whose result for one row does not depend on the rows beside it.

A floating-point sum depends on its order, and a GEMM library chooses the order by the shape and the layout of its
operands. So every product here is a batch of tiles of one fixed shape and layout, and every sum is a tree fixed by the
positions of its terms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 16  # rows of every product


def widened(x: Tensor) -> Tensor:
    """``x`` in the precision reductions are done in: float32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def tiled_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, k] x [k, m] → [rows, m]."""
    rows, k = x.shape
    tiles = -(-rows // TILE)
    padded = torch.constant_pad_nd(x, (0, 0, 0, tiles * TILE - rows)).contiguous()
    product = torch.bmm(padded.view(tiles, TILE, k), weight.expand(tiles, -1, -1))
    return product.view(tiles * TILE, weight.shape[1])[:rows]


def halving_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept as 1: the second half onto the first until one is left.

    The tree depends on the width, so use it only where that is fixed.
    """
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = F.pad(x, (0, width - x.shape[-1])) if width != x.shape[-1] else x
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def pairwise_sum(x: Tensor) -> Tensor:
    """Sum over dimension 1: neighbours are added until one is left. Zeros at the end change nothing."""
    while x.shape[1] > 1:
        even, odd = x[:, 0::2], x[:, 1::2]
        x = even + (odd if odd.shape == even.shape else _with_zero(odd))
    return x[:, 0]


def _with_zero(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], dim=1)


def products(x: Tensor, y: Tensor) -> Tensor:
    """Scalar products along the last dimension, of which one term is added after the other."""
    x, y = (factor.movedim(-1, 0).contiguous() for factor in (x, y))
    total = x[0] * y[0]
    for place in range(1, len(x)):
        total += x[place] * y[place]
    return total


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x). torch's own uses another exponential in the tail of a vector loop than in its body."""
    return x / (1 + torch.exp(-x))
