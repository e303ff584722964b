"""How a kernel is declared: its arguments as a tuple that knows its outputs, its cost and its footprint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from .registry import Access, Work, kernel


class Arguments(Protocol):
    """An op's arguments, in the order of its schema; usually a NamedTuple."""

    def meta(self) -> torch.Tensor | None: ...

    def cost(self) -> Work: ...

    def footprint(self) -> tuple[Access, ...]: ...


def declared(
    schema: str,
    arguments: Callable[..., Arguments],
    *,
    integer: bool = False,
    fixed_cost: bool = True,
    triton: str = "",
    strided: Collection[str] = (),
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """``registry.kernel`` for a kernel whose ``arguments`` answer for it."""
    return kernel(
        schema,
        meta=lambda *args: arguments(*args).meta(),
        cost=lambda *args: arguments(*args).cost(),
        footprint=lambda *args: arguments(*args).footprint(),
        integer=integer,
        fixed_cost=fixed_cost,
        triton=triton,
        strided=strided,
    )


def nothing(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of ``shape`` on the meta device, made without running an op there."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of all elements; the absent count nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def reads(*tensors: torch.Tensor | None) -> tuple[Access, ...]:
    """Each tensor that is there, read as a whole."""
    return tuple(Access(t, write=False) for t in tensors if t is not None)
