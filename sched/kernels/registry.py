"""Custom ops of the engine: one declaration gives torch the op and a device its cost and footprint.

A kernel is one launch on a device. ``torch.ops.schedbench.<name>`` runs the torch implementation on CPU, on CUDA
the Triton kernel where there is one; on a virtual GPU it arrives whole, as one op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from .on_cuda import on_cuda

NAMESPACE = "schedbench"

Unit = Literal["memory", "gemm", "attention"]


class Work(NamedTuple):
    """What one launch asks of the hardware."""

    bytes: int  # device memory traffic, read and written
    flops: int = 0
    unit: Unit = "memory"  # which efficiency of the hardware profile applies
    host_bytes: int = 0  # pinned host memory read or written by the kernel: no memcpy counter sees it
    beside: bool = False  # moves bytes with so few multiprocessors that other streams' kernels run on


class Access(NamedTuple):
    """One tensor a launch reads or writes; ``rows`` narrows it to indices along dim 0, ``lens`` each of those to
    its first entries along dim 1. Of ``rows`` [n, m] only the first ``counts[i]`` of line i are meant."""

    tensor: torch.Tensor
    write: bool
    rows: torch.Tensor | None = None
    lens: torch.Tensor | None = None
    counts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """``impl`` computes on real tensors; ``meta`` returns outputs of the right shape from arguments of any
    device, without running torch's own Meta kernels. ``cost`` and ``footprint`` take the op's arguments,
    ``cost`` is None for the emulator's own bookkeeping, which no real device would run. ``triton`` is the
    module of ``triton/`` that has the op too, under its own name; empty where none has. It is given tensors without
    gaps at the places ``dense``, which are those it reads and does not name in ``strided``.
    """

    name: str
    op: torch._ops.OpOverload
    impl: Callable[..., Any]
    meta: Callable[..., Any]
    cost: Callable[..., Work] | None
    footprint: Callable[..., tuple[Access, ...]]
    integer: bool  # all outputs and mutated arguments are integers: computed even where floats are skipped
    fixed_cost: bool  # cost depends on shapes only, not on values
    triton: str
    dense: frozenset[int]


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_KERNELS: dict[torch._ops.OpOverload, Kernel] = {}


def kernel(
    schema: str,
    *,
    meta: Callable[..., Any],
    cost: Callable[..., Work] | None,
    footprint: Callable[..., tuple[Access, ...]],
    integer: bool = False,
    fixed_cost: bool = True,
    triton: str = "",
    strided: Collection[str] = (),
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Register the decorated torch implementation under ``schema`` (torch's schema language).

    The name becomes the op itself, so that calling it goes through torch's dispatcher.
    """

    def register(impl: Callable[..., Any]) -> torch._ops.OpOverload:
        name = _LIBRARY.define(schema)
        op: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        dense = _read_whole(op, strided)
        _LIBRARY.impl(name, impl, "CPU")
        _LIBRARY.impl(name, on_cuda(name, triton, impl, dense) if triton else impl, "CUDA")
        _LIBRARY.impl(name, meta, "Meta")
        _KERNELS[op] = Kernel(name, op, impl, meta, cost, footprint, integer, fixed_cost, triton, dense)
        return op

    return register


def _read_whole(op: torch._ops.OpOverload, strided: Collection[str]) -> frozenset[int]:
    """Places of the tensors that are read only and may have no gaps."""
    return frozenset(
        place
        for place, argument in enumerate(op._schema.arguments)
        if str(argument.type) in ("Tensor", "Optional[Tensor]")
        and argument.alias_info is None
        and argument.name not in strided
    )


def kernels() -> Mapping[torch._ops.OpOverload, Kernel]:
    """All kernels registered so far, by op."""
    return _KERNELS
