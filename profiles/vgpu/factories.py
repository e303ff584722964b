"""New tensors: memory first, then a kernel that fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .bindings import copy_
from .executor import Outline
from .skipping import Outlines, outline
from .tensor import DeviceTensor, wrap

if TYPE_CHECKING:
    from .gpu import VirtualGpu

# How the result of each is filled from the remaining arguments.
LIKES: Mapping[str, Callable[[torch.Tensor, Sequence[Any]], object]] = {
    "empty_like": lambda t, _: t,
    "new_empty": lambda t, _: t,
    "new_empty_strided": lambda t, _: t,
    "zeros_like": lambda t, _: t.zero_(),
    "new_zeros": lambda t, _: t.zero_(),
    "ones_like": lambda t, _: t.fill_(1),
    "new_ones": lambda t, _: t.fill_(1),
    "full_like": lambda t, rest: t.fill_(rest[0]),
    "new_full": lambda t, rest: t.fill_(rest[1]),
    "rand_like": lambda t, _: t.uniform_(),
    "randn_like": lambda t, _: t.normal_(),
}


def like_handler(
    gpu: VirtualGpu, func: torch._ops.OpOverload, name: str
) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    op, fill, outlines, runtime = func._op, LIKES[name], Outlines(), gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        place = kwargs.get("device")
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format") and v is not None}
        made: Outline = outlines(op, (args[0].held, *args[1:]), options)
        if place is not None and place.type != gpu.device.type:
            result = torch.empty_strided(made.size, made.stride, dtype=made.dtype, device=place)
        else:
            runtime.now += runtime.torch_call
            result = wrap(gpu.executor.empty(made))
        fill(result, args[1:])
        return result

    return handler


def new(
    gpu: VirtualGpu, size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype | None
) -> DeviceTensor:
    """Uninitialised device memory."""
    runtime = gpu.runtime
    runtime.now += runtime.torch_call
    steps = _contiguous(size) if stride is None else tuple(stride)
    tensor = wrap(gpu.executor.empty(Outline(tuple(size), steps, dtype or torch.get_default_dtype())))
    gpu.watcher.made(tensor)
    return tensor


def generated(gpu: VirtualGpu, name: str, value: torch.Tensor) -> DeviceTensor:
    """A tensor that one kernel computes from nothing (arange, eye, ...); an empty one takes none."""
    runtime, held = gpu.runtime, gpu.executor.empty(outline(value))
    gpu.executor.mutate(copy_, (held, value), {})
    if held.numel():
        runtime.kernel(name, runtime.costs.memory(held.nbytes))
    else:
        runtime.now += runtime.torch_call
    tensor = wrap(held)
    gpu.watcher.generated(name, tensor)
    return tensor


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
