"""Functions of torch's Python API that are not dispatched, replaced for the duration of a run.

A CPU build of torch has no pinned allocator, so ``pin_memory`` and ``is_pinned`` are implemented here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch.utils._device import _device_constructors

from .device import CURRENT
from .direct import shortcuts
from .patching import attributes_set
from .tensor import DeviceTensor, is_pinned, pin

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


def installed(*, shortened: bool) -> AbstractContextManager[None]:
    """Torch with the pinned memory of the virtual GPU that is open, for the duration of a block; ``shortened``: with
    the shortcuts of ``direct``, on which torch records no gradients."""
    tensor = torch.Tensor
    _device_constructors()  # cached at its first call, which must see the functions as they were
    return attributes_set(
        [
            *((torch, name, _factory(getattr(torch, name))) for name in _FACTORIES),
            *((tensor, name, _factory(getattr(tensor, name))) for name in _METHODS),
            (tensor, "pin_memory", _pin_memory),
            (tensor, "is_pinned", _is_pinned),
            *(shortcuts() if shortened else ()),
        ]
    )


def _factory(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(function)
    def patched(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs.pop("pin_memory", False):
            return function(*args, **kwargs)
        _require_pinned()
        result = function(*args, **kwargs)
        if type(result) is DeviceTensor:
            raise RuntimeError("only host tensors can be pinned")
        CURRENT.get().runtime.pin(result.nbytes, copied=False)
        return pin(result)

    return patched


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:  # noqa: ARG001
    """A copy in pinned memory, or the tensor itself if it is pinned already."""
    _require_pinned()
    if type(tensor) is DeviceTensor:
        raise RuntimeError(f"cannot pin '{tensor.device}': only dense CPU tensors can be pinned")
    if is_pinned(tensor):
        return tensor
    CURRENT.get().runtime.pin(tensor.nbytes, copied=True)
    return pin(tensor.clone())


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:  # noqa: ARG001
    return type(tensor) is not DeviceTensor and is_pinned(tensor)


def _require_pinned() -> None:
    if not CURRENT.get().capabilities.pinned_memory:
        raise RuntimeError(_NO_PINNED)
