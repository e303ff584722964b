"""RMSNorm (arXiv 1910.07467), alone and with the residual stream's update."""

from __future__ import annotations

import torch
from torch import Tensor

from .declare import kernel, meta_like, nbytes
from .invariant import halving_sum, widened
from .registry import Work


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Last dimension scaled to a root mean square of 1, then by ``weight``."""
    wide = widened(x)
    mean = halving_sum(wide * wide) / x.shape[-1]
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight


@kernel(
    meta=lambda x: meta_like(x), cost=lambda x, weight: Work(2 * nbytes(x) + nbytes(weight)), triton="norm"
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, n], weight [n] → [rows, n]."""
    return normalised(x, weight, eps)


@kernel(
    mutates=("residual",),
    meta=lambda x: meta_like(x),
    cost=lambda x, residual, weight: Work(2 * nbytes(x, residual) + nbytes(weight)),
    triton="norm",
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x [rows, n] to the residual in place and returns the residual's norm."""
    residual.add_(x)
    return normalised(residual, weight, eps)
