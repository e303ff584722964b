"""What a custom op runs on CUDA: its Triton kernel where there is one, else the torch implementation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def on_cuda(
    name: str, module: str, impl: Callable[..., Any], dense: Collection[int] = ()
) -> Callable[..., Any]:
    """``triton_kernel``, imported when it is first called, since Triton takes a second to import and other devices do
    without. ``impl`` where Triton is not installed, and in float64, which is there to compare with."""

    @cache
    def fast() -> Callable[..., Any]:
        return impl if find_spec("triton") is None else triton_kernel(name, module, dense)

    def run(*args: Any) -> Any:
        return impl(*args) if _double(args[0]) else fast()(*args)

    return run


def triton_kernel(name: str, module: str, dense: Collection[int]) -> Callable[..., Any]:
    """The launch function ``name`` of ``triton/<module>.py``; its arguments at the places ``dense`` are made
    contiguous first, which they nearly always are. Raises ImportError without Triton."""
    launch: Callable[..., Any] = getattr(import_module(f"{__package__}.triton.{module}"), name)

    def run(*args: Any) -> Any:
        return launch(*(_whole(arg) if place in dense else arg for place, arg in enumerate(args)))

    return run


def _whole(arg: Any) -> Any:
    return arg.contiguous() if isinstance(arg, torch.Tensor) else arg


def _double(first: object) -> bool:
    return isinstance(first, torch.Tensor) and first.dtype == torch.float64
