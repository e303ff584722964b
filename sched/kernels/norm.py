"""RMSNorm (arXiv 1910.07467), alone and with the residual stream's update."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .invariant import halving_sum, widened
from .registry import Access, Work


def normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Last dimension scaled to a root mean square of 1, then by ``weight``."""
    wide = widened(x)
    mean = halving_sum(wide * wide) / x.shape[-1]
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight


class _RmsNorm(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    eps: float

    def meta(self) -> torch.Tensor:
        return nothing(*self.x.shape, dtype=self.x.dtype)

    def cost(self) -> Work:
        return Work(2 * nbytes(self.x) + nbytes(self.weight))

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.x, self.weight)


@declared("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _RmsNorm, triton="norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, n], weight [n] → [rows, n]."""
    return normalised(x, weight, eps)


class _AddRmsNorm(NamedTuple):
    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    eps: float

    def meta(self) -> torch.Tensor:
        return nothing(*self.x.shape, dtype=self.x.dtype)

    def cost(self) -> Work:
        return Work(2 * nbytes(self.x) + 2 * nbytes(self.residual) + nbytes(self.weight))

    def footprint(self) -> tuple[Access, ...]:
        return (*reads(self.x, self.weight), Access(self.residual, write=True))


@declared(
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
    _AddRmsNorm,
    triton="norm",
)
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x [rows, n] to the residual in place and returns the residual's norm."""
    residual.add_(x)
    return normalised(residual, weight, eps)
