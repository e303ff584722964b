"""Ops that read a number on the host: each copies a few bytes to a pinned temporary and waits for the copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .device import VirtualGpu
from .op_kinds import Handler, reads_of
from .tensor import unwrap, unwrap_named, wrapped


def scalar_handler(gpu: VirtualGpu) -> Handler:
    """``item()``, ``int()``, ``bool()`` and all other reads of one number."""
    op, runtime = torch.ops.aten._local_scalar_dense.default._op, gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = args[0].held
        runtime.copy("d2h", held.itemsize, pinned=True, blocking=True)
        return gpu.executor.read(op, (held,), kwargs)

    return handler


def read_handler(gpu: VirtualGpu, func: torch._ops.OpOverload, name: str) -> Handler:
    """A kernel whose result, or the result's shape, the host needs."""
    op, runtime = func._op, gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = unwrap(args)
        runtime.kernel(name, runtime.costs.memory(sum(a.nbytes for a in held if isinstance(a, torch.Tensor))))
        for size in reads_of(name, args, kwargs):
            runtime.copy("d2h", size, pinned=True, blocking=True)
        return wrapped(gpu.executor.read(op, held, unwrap_named(kwargs)))

    return handler
