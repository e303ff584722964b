"""The custom ops of the engine, each with its cost and its footprint for a device that emulates or checks it.

A kernel is one launch on a device. ``torch.ops.schedbench.<name>`` runs the torch implementation on the CPU, and on
CUDA the Triton kernel where there is one; on a virtual GPU it arrives whole, as one op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from .signature import Signature

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
    its first entries along dim 1. ``counts`` limits ``rows`` [n, m] to the first ``counts[i]`` indices of line i."""

    tensor: torch.Tensor
    write: bool
    rows: torch.Tensor | None = None
    lens: torch.Tensor | None = None
    counts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """An op and what is declared of it. All functions take the op's arguments by position.

    ``impl`` computes on real tensors; ``meta`` returns outputs of the right shape from arguments of any device,
    without running torch's own Meta kernels. ``cost`` is None for the emulator's own bookkeeping, which no real device
    would run. ``triton`` is the module of ``triton/`` with a launch function of the op's name, or empty; its arguments
    at the positions ``dense`` are made contiguous first.
    """

    name: str
    op: torch._ops.OpOverload
    signature: Signature
    impl: Callable[..., Any]
    meta: Callable[..., Any]
    cost: Callable[..., Work] | None
    footprint: Callable[..., tuple[Access, ...]]
    integer: bool  # all outputs and mutated arguments are integers: computed even where floats are skipped
    fixed_cost: bool  # cost depends on shapes only, not on values
    triton: str
    dense: frozenset[int]


_KERNELS: dict[torch._ops.OpOverload, Kernel] = {}


def register(kernel: Kernel) -> None:
    _KERNELS[kernel.op] = kernel


def kernels() -> Mapping[torch._ops.OpOverload, Kernel]:
    """All kernels registered so far, by op."""
    return _KERNELS
