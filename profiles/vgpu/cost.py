"""Durations of kernels and copies in ns, by rooflines over a hardware profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...sched.kernels.declare import Work
from ..platform.hardware import HardwareProfile

Bytes = Callable[[Sequence[Any], Any], int]


class Costs:
    """Durations on one hardware."""

    def __init__(self, hardware: HardwareProfile) -> None:
        kernels, copies = hardware.kernels, hardware.copies
        share = kernels.efficiency
        self.fixed = round(kernels.fixed.value)
        self.gap = round(kernels.gap.value)
        self.graph_gap = round(kernels.graph_gap.value)
        self.inline = round(copies.pageable_inline.value)
        self._ns_per_byte = 1e9 / (kernels.memory_bandwidth.value * share.memory.value)
        self._ns_per_flop = {
            (unit, getattr(torch, dtype)): 1e9 / (rate.value * efficiency)
            for unit, efficiency in (
                ("memory", 1.0),
                ("gemm", share.gemm.value),
                ("attention", share.attention.value),
            )
            for dtype, rate in kernels.gemm_rates
        }
        self._copy_fixed = copies.fixed.value
        self._copy_ns_per_byte: dict[tuple[str, bool], float] = {
            (direction, memory == "pinned"): 1e9 / getattr(copies, f"{direction}_{memory}").value
            for direction in ("h2d", "d2h")
            for memory in ("pinned", "pageable")
        }
        self._memcpy_ns_per_byte = 1e9 / copies.host_memcpy.value

    def memory(self, size: int) -> int:
        """A kernel that moves ``size`` bytes of device memory."""
        return self.fixed + round(size * self._ns_per_byte)

    def work(self, work: Work, dtype: torch.dtype) -> int:
        """A kernel by its own formula; bytes of host memory move at the bandwidth of the bus."""
        size, flops, unit, host_bytes, _ = work
        time = size * self._ns_per_byte
        if flops:
            time = max(time, flops * self._ns_per_flop[unit, dtype])
        if host_bytes:
            time = max(time, host_bytes * self._copy_ns_per_byte["h2d", True])
        return self.fixed + round(time)

    def copy(self, direction: str, size: int, *, pinned: bool) -> int:
        return round(self._copy_fixed + size * self._copy_ns_per_byte[direction, pinned])

    def memcpy(self, size: int) -> int:
        """The host copies ``size`` bytes of its own memory."""
        return round(size * self._memcpy_ns_per_byte)


def nbytes(values: Iterable[Any]) -> int:
    """Bytes of the tensors among the values and the lists among them."""
    size = 0
    for value in values:
        kind = type(value)
        if kind is torch.Tensor:
            size += value.nbytes
        elif kind is list or kind is tuple:
            size += nbytes(value)
    return size


def touched(args: Sequence[Any], out: Any) -> int:
    """Bytes of all arguments and results: elementwise operations and reductions."""
    return nbytes(args) + (out.nbytes if isinstance(out, torch.Tensor) else nbytes((out,)))


def gathered(args: Sequence[Any], out: torch.Tensor) -> int:
    """Bytes of a gather: the rows read and written, and the indices; not the table."""
    return 2 * out.nbytes + nbytes(args[1:])


def scattered(args: Sequence[Any], out: torch.Tensor) -> int:  # noqa: ARG001
    """Bytes of a scatter: the values read and written, and the indices; not the table."""
    sizes = [nbytes((arg,)) for arg in args[1:]]
    return sum(sizes) + max(sizes)


def filled(args: Sequence[torch.Tensor], out: Any) -> int:  # noqa: ARG001
    return args[0].nbytes


def gemm(args: Sequence[torch.Tensor], out: torch.Tensor) -> Work:
    """mm, bmm and their kind: the last two tensor arguments are multiplied."""
    inner = [a for a in args if isinstance(a, torch.Tensor)][-1].shape[-2 if args[-1].dim() > 1 else -1]
    return Work(bytes=touched(args, out), flops=2 * out.numel() * inner, unit="gemm")


GEMMS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv"})
# The rule for the bytes of an op by its name; for all others it is ``touched``.
BYTES: Mapping[str, Bytes] = {
    **dict.fromkeys(("index", "index_select", "gather", "embedding", "take_along_dim", "take"), gathered),
    **dict.fromkeys(("index_put_", "index_put", "index_copy_", "index_add_"), scattered),
    **dict.fromkeys(("scatter_", "scatter_add_", "index_fill_"), scattered),
    **dict.fromkeys(("fill_", "zero_", "uniform_", "normal_", "random_", "exponential_"), filled),
}
