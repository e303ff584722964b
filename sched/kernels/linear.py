"""Matrix products with the model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .invariant import tiled_matmul
from .registry import Access, Work


class _Linear(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    out_dtype: torch.dtype

    def meta(self) -> torch.Tensor:
        return nothing(self.x.shape[0], self.weight.shape[1], dtype=self.out_dtype)

    def cost(self) -> Work:
        rows, (k, m) = self.x.shape[0], self.weight.shape
        traffic = nbytes(self.x, self.weight, self.bias) + rows * m * self.out_dtype.itemsize
        return Work(traffic, 2 * rows * k * m, "gemm")

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.x, self.weight, self.bias)


@declared("linear(Tensor x, Tensor weight, Tensor? bias, ScalarType out_dtype) -> Tensor", _Linear)
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """x [rows, k] · weight [k, m] + bias [m] → [rows, m] of ``out_dtype``."""
    if x.device.type == "cpu":
        product = tiled_matmul(x, weight)
        return (product if bias is None else product + bias).to(out_dtype)
    return multiplied(x, weight, bias, out_dtype)


class _LinearColumns(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    columns: Sequence[int]
    width: int
    out_dtype: torch.dtype

    def meta(self) -> torch.Tensor:
        return nothing(self.x.shape[0], self.weight.shape[1], dtype=self.out_dtype)

    def cost(self) -> Work:
        return _Linear(self.x, self.weight, None, self.out_dtype).cost()

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.x, self.weight)


@declared(
    "linear_columns(Tensor x, Tensor weight, int[] columns, int width, ScalarType out_dtype) -> Tensor",
    _LinearColumns,
)
def linear_columns(
    x: torch.Tensor, weight: torch.Tensor, columns: Sequence[int], width: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """x [rows, k] · some columns [k, m] of a weight that is ``width`` wide → [rows, m] of ``out_dtype``: what the whole
    product has there. ``columns``: where runs of them begin and end, in order.

    A library's sums follow from the shape of the product: here they are those of the whole one.
    """
    if x.device.type != "cpu":
        return multiplied(x, weight, None, out_dtype)
    places = torch.cat([torch.arange(*run) for run in zip(columns[::2], columns[1::2], strict=True)])
    whole = weight.new_zeros(weight.shape[0], width)
    whole[:, places] = weight
    return tiled_matmul(x, whole)[:, places].to(out_dtype)


def multiplied(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``linear`` by the library of a device, whose sums are wider than x: one launch, or two with a bias to widen."""
    if out_dtype == x.dtype:
        return x @ weight if bias is None else torch.addmm(bias, x, weight)
    product = _widening(x, weight, out_dtype)
    return product if bias is None else product + bias


def _widening(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:  # cuda-only
    """float32 of 16-bit floats."""
    return torch.mm(x, weight, out_dtype=out_dtype)
