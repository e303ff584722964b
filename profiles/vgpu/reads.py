"""Ops that read a number on the host: each copies a few bytes to a pinned temporary and waits for the copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .device import VirtualGpu
from .op_kinds import READS, Handler
from .tensor import DeviceTensor, unwrap, wrap


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
        for size in READS[name] if kwargs.get("output_size") is None else ():
            runtime.copy("d2h", size, pinned=True, blocking=True)
        return _wrapped(gpu.executor.read(op, held, kwargs))

    return handler


def _wrapped(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return out if type(out) is DeviceTensor else wrap(out)
    return [wrap(o) for o in out] if isinstance(out, (list, tuple)) else out
