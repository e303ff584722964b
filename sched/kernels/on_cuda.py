"""What a custom op runs on CUDA: its Triton kernel where there is one, else the torch implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def on_cuda(name: str, module: str, impl: Callable[..., Any]) -> Callable[..., Any]:
    """The function ``name`` of ``triton/<module>.py``, imported when it is first called, since Triton takes a second
    to import and other devices do without. ``impl`` where Triton is not installed, and in float64, which is there to
    compare with."""

    @cache
    def fast() -> Callable[..., Any]:
        return impl if find_spec("triton") is None else triton_kernel(name, module)

    def run(*args: Any) -> Any:
        return impl(*args) if _double(args[0]) else fast()(*args)

    return run


def triton_kernel(name: str, module: str) -> Callable[..., Any]:
    """The launch function of an op. Raises ImportError without Triton."""
    launch: Callable[..., Any] = getattr(import_module(f"{__package__}.triton.{module}"), name)
    return launch


def _double(first: object) -> bool:
    return isinstance(first, torch.Tensor) and first.dtype == torch.float64
