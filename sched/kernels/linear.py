"""Matrix products with the model's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .declare import kernel, meta_tensor, nbytes
from .invariant import tiled_matmul
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
