"""Custom kernels of the engine: each arrives whole, as one launch with its own cost formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...sched.kernels.registry import Kernel, Work
from .pinned import is_pinned
from .tensor import HOST_TENSORS, DeviceTensor, refuse_mixed, wrap

if TYPE_CHECKING:
    from .cost import Costs
    from .gpu import VirtualGpu


UNKNOWN = 10_000  # ns of a kernel whose time follows from values that are not there yet


def custom_handler(gpu: VirtualGpu, kernel: Kernel) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    returns = len(kernel.op._schema.returns)

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = [_held(arg) for arg in args]
        named = {name: _held(value) for name, value in kwargs.items()} if kwargs else kwargs
        if kernel.cost is not None:
            _launch(gpu, kernel, kernel.cost, held, named)
        out = gpu.executor.launch(kernel, held, named)
        if not returns:
            return None
        return wrap(out) if isinstance(out, torch.Tensor) else [wrap(o) for o in out]

    return handler


def _launch(
    gpu: VirtualGpu, kernel: Kernel, cost: Callable[..., Work], held: Sequence[Any], named: Mapping[str, Any]
) -> None:
    if gpu.capture is not None and not kernel.fixed_cost:
        gpu.capture.variable(kernel, held, named)
        return
    runtime = gpu.runtime
    if not (kernel.fixed_cost or gpu.executor.prompt):
        runtime.kernel(kernel.name, UNKNOWN)
        return
    work = cost(*held, **named)
    runtime.kernel(kernel.name, duration(runtime.costs, work, held), host_size=work.host_bytes)


def duration(costs: Costs, work: Work, args: Sequence[Any]) -> int:
    """A kernel's time; flops at the rate of its first floating argument."""
    return costs.work(work, _dtype(args) if work.flops else torch.float32)


def _dtype(args: Sequence[Any]) -> torch.dtype:
    floats = (a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
    return next(floats, torch.float32)


def _held(arg: Any) -> Any:
    """A kernel may also read pinned host memory; an empty tensor of the host has no memory to read."""
    if type(arg) is DeviceTensor:
        return arg.held
    if isinstance(arg, (list, tuple)):
        return [_held(item) for item in arg]
    if type(arg) in HOST_TENSORS and arg.dim() and arg.numel() and not is_pinned(arg):
        refuse_mixed(arg.device)
    return arg
