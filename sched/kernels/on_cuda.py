"""Runs a custom op on CUDA by its Triton kernel where it has one, else by the torch implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from .registry import Kernel


def on_cuda(kernel: Kernel) -> Callable[..., Any]:
    """Returns a function that imports ``triton_kernel``'s module at its first call: Triton takes a second to import,
    and other devices do not need it. Without Triton, and in float64, which serves as a reference, it runs the torch
    implementation."""

    @cache
    def fast() -> Callable[..., Any]:
        return kernel.impl if find_spec("triton") is None else triton_kernel(kernel)

    def run(*args: Any) -> Any:
        return kernel.impl(*args) if _is_double(args[0]) else fast()(*args)

    return run


def triton_kernel(kernel: Kernel) -> Callable[..., Any]:
    """Returns the launch function of the kernel's name in its module of ``triton/``, as a function of all the op's
    arguments. Those at the positions ``dense`` are made contiguous first, which costs nothing where they are already.
    Raises ImportError without Triton."""
    module = import_module(f"{__package__}.triton.{kernel.triton}")
    launch, dense = kernel.signature.bind(getattr(module, kernel.name)), kernel.dense

    def run(*args: Any) -> Any:
        return launch(*(_contiguous(arg) if place in dense else arg for place, arg in enumerate(args)))

    return run


def _contiguous(arg: Any) -> Any:
    return arg.contiguous() if isinstance(arg, torch.Tensor) else arg


def _is_double(first: object) -> bool:
    return isinstance(first, torch.Tensor) and first.dtype == torch.float64
