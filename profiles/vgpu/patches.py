"""Calls of torch's Python API that dispatch cannot see: installed for a run and removed after it.

A CPU build has no pinned allocator, so ``pin_memory`` and ``is_pinned`` are answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from .pinned import is_pinned, pin
from .tensor import DeviceTensor

if TYPE_CHECKING:
    from .gpu import VirtualGpu

_FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "randint",
    "empty_strided",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
)
_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full")
_NO_PINNED = "this device has no pinned memory; allocate ordinary host memory instead"


@contextmanager
def installed(gpu: VirtualGpu) -> Iterator[None]:
    """Torch with pinned memory, for the duration of the block."""
    undo = [
        *(replace(torch, name, _factory(gpu, getattr(torch, name))) for name in _FACTORIES),
        *(replace(torch.Tensor, name, _factory(gpu, getattr(torch.Tensor, name))) for name in _METHODS),
        replace(torch.Tensor, "pin_memory", _pin_memory(gpu)),
        replace(torch.Tensor, "is_pinned", _is_pinned),
    ]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def replace(owner: Any, name: str, function: Any) -> Callable[[], None]:
    """Set an attribute; the result undoes it. What was inherited is inherited again."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, function)
    return (lambda: setattr(owner, name, before)) if own else (lambda: delattr(owner, name))


def _factory(gpu: VirtualGpu, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(function)
    def patched(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs.pop("pin_memory", False):
            return function(*args, **kwargs)
        _require(gpu)
        result = function(*args, **kwargs)
        if type(result) is DeviceTensor:
            raise RuntimeError("only host tensors can be pinned")
        gpu.runtime.pin(result.nbytes, copied=False)
        return pin(result)

    return patched


def _pin_memory(gpu: VirtualGpu) -> Callable[..., torch.Tensor]:
    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:  # noqa: ARG001
        """A copy in pinned memory; the tensor itself if it is there already."""
        _require(gpu)
        if type(tensor) is DeviceTensor:
            raise RuntimeError(f"cannot pin '{tensor.device}': only dense CPU tensors can be pinned")
        if is_pinned(tensor):
            return tensor
        gpu.runtime.pin(tensor.nbytes, copied=True)
        return pin(tensor.clone())

    return pin_memory


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:  # noqa: ARG001
    return type(tensor) is not DeviceTensor and is_pinned(tensor)


def _require(gpu: VirtualGpu) -> None:
    if not gpu.capabilities.pinned_memory:
        raise RuntimeError(_NO_PINNED)
