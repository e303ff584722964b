"""What a custom op runs on CUDA: its Triton kernel where there is one, else the torch implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from .registry import Kernel


def on_cuda(kernel: Kernel) -> Callable[..., Any]:
    """``triton_kernel``, imported when it is first called, since Triton takes a second to import and other devices do
    without. The torch implementation where Triton is not installed, and in float64, which is there to compare with."""

    @cache
    def fast() -> Callable[..., Any]:
        return kernel.impl if find_spec("triton") is None else triton_kernel(kernel)

    def run(*args: Any) -> Any:
        return kernel.impl(*args) if _is_double(args[0]) else fast()(*args)

    return run


def triton_kernel(kernel: Kernel) -> Callable[..., Any]:
    """The launch function of the kernel's name in its module of ``triton/``, as a function of all the op's arguments;
    those at the places ``dense`` are made contiguous first, which they nearly always are. Raises ImportError without
    Triton."""
    module = import_module(f"{__package__}.triton.{kernel.triton}")
    launch, dense = kernel.signature.bind(getattr(module, kernel.name)), kernel.dense

    def run(*args: Any) -> Any:
        return launch(*(_contiguous(arg) if place in dense else arg for place, arg in enumerate(args)))

    return run


def _contiguous(arg: Any) -> Any:
    return arg.contiguous() if isinstance(arg, torch.Tensor) else arg


def _is_double(first: object) -> bool:
    return isinstance(first, torch.Tensor) and first.dtype == torch.float64
