"""New tensors: an allocation, and a kernel that fills it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...sched.kernels.declare import contiguous_strides
from .device import VirtualGpu
from .executor import TensorSpec, spec_of
from .tensor import DeviceTensor, wrap
from .torch_ops import LIKES, Handler, copy_


def like_handler(gpu: VirtualGpu, name: str) -> Handler:
    fill, runtime = LIKES[name], gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        target = kwargs.get("device")
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format") and v is not None}
        held = args[0].held
        # On the host, where the memory is not touched: torch's function for the meta device imports a compiler.
        like = torch.empty_strided(held.size(), held.stride(), dtype=held.dtype)
        if name.endswith("_like"):
            form = torch.empty_like(like, **options)
        elif name == "new_empty_strided":
            form = like.new_empty_strided(*args[1:3], **options)
        else:
            form = like.new_empty(args[1], **options)
        spec = spec_of(form)
        if target is not None and target.type != gpu.device.type:
            result = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=target)
        else:
            runtime.now += runtime.torch_call
            result = wrap(gpu.executor.empty(spec))
        fill(result, args[1:])
        return result

    return handler


def new(
    gpu: VirtualGpu, size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype | None
) -> DeviceTensor:
    """Uninitialised device memory."""
    runtime = gpu.runtime
    runtime.now += runtime.torch_call
    tensor = wrap(gpu.executor.empty(_spec(size, stride, dtype)))
    gpu.watcher.made(tensor)
    return tensor


def zeros(gpu: VirtualGpu, size: Sequence[int], dtype: torch.dtype | None) -> DeviceTensor:
    """Device memory that a kernel sets to zero (torch's ``fill_``, as in releases before pull 195303)."""
    runtime, held = gpu.runtime, gpu.executor.zeros(_spec(size, None, dtype))
    runtime.now += runtime.torch_call
    if held.numel():
        runtime.kernel("zero_", runtime.costs.memory(held.nbytes))
    tensor = wrap(held)
    gpu.watcher.generated("zero_", tensor)
    return tensor


def _spec(size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype | None) -> TensorSpec:
    shape = tuple(size)
    steps = contiguous_strides(shape) if stride is None else tuple(stride)
    return TensorSpec(shape, steps, dtype or torch.get_default_dtype())


def generated(gpu: VirtualGpu, name: str, value: torch.Tensor) -> DeviceTensor:
    """A tensor that one kernel computes without inputs (arange, eye, ...); an empty one needs no kernel."""
    runtime, held = gpu.runtime, gpu.executor.empty(spec_of(value))
    gpu.executor.mutate(copy_, (held, value), {})
    if held.numel():
        runtime.kernel(name, runtime.costs.memory(held.nbytes))
    else:
        runtime.now += runtime.torch_call
    tensor = wrap(held)
    gpu.watcher.generated(name, tensor)
    return tensor
