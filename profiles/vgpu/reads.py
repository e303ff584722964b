"""Ops that bring a number to the host, openly or not: each copies a few bytes to a pinned temporary and waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .tensor import DeviceTensor, unwrap, wrap

if TYPE_CHECKING:
    from .gpu import VirtualGpu

COUNT_BYTES = 4  # the number of true elements, as CUB counts

# Bytes of each number read.
READS: Mapping[str, Sequence[int]] = {
    "nonzero": (COUNT_BYTES,),
    "masked_select": (COUNT_BYTES,),
    "_unique2": (8,),
    "unique_dim": (8,),
    "unique_consecutive": (8,),
    "repeat_interleave": (8,),
    "bincount": (8, 8),
    "equal": (1,),
    "allclose": (1,),
    "multinomial": (1, 1),
}


def scalar_handler(gpu: VirtualGpu) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """``item()``, ``int()``, ``bool()`` and whatever else wants one number."""
    op, runtime = torch.ops.aten._local_scalar_dense.default._op, gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = args[0].held
        runtime.copy("d2h", held.itemsize, pinned=True, blocking=True)
        return gpu.executor.read(op, (held,), kwargs)

    return handler


def read_handler(
    gpu: VirtualGpu, func: torch._ops.OpOverload, name: str
) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """A kernel whose result, or the result's shape, the host has to know."""
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
