"""Kernels that are no operators of torch, each one launch with its own cost: the custom ones of the engine, which torch
dispatches, and those of other languages, whose accesses and time are known only once they were computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ...sched.kernels.declare import Kernel, Work
from ..platform.machine import VisitingKernel
from .cost import Costs
from .device import CURRENT, VirtualGpu
from .engine import BESIDE, COMPUTE
from .runtime import TimedByValues
from .tensor import HOST_TENSORS, PLAIN, DeviceTensor, is_pinned, refuse_mixed, wrap
from .torch_ops import Handler

UNKNOWN = 10_000  # ns, for a kernel whose time follows from values that are not computed yet


def custom_handler(gpu: VirtualGpu, kernel: Kernel) -> Handler:
    runtime, name, cost, fixed = gpu.runtime, kernel.name, kernel.cost, kernel.fixed_cost
    costs, call = runtime.costs, runtime.kernel_call
    returns = len(kernel.op._schema.returns)

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG001 - torch passes none by name
        held = [
            arg.held if (kind := type(arg)) is DeviceTensor else arg if kind in PLAIN else _passed(arg)
            for arg in args
        ]
        executor = gpu.executor
        if cost is None:  # bookkeeping of the emulator's own, which no device executes
            pass
        elif runtime.capture is not None and not fixed:
            runtime.capture.variable(kernel, held)
        elif fixed or executor.eager:
            work = cost(*held)
            size, flops, _, host_size, beside = work
            time = duration(costs, work, held) if flops or host_size else costs.memory(size)
            engine = BESIDE if beside else COMPUTE
            runtime.kernel(name, time, host_size=host_size, engine=engine, call=call)
        else:
            runtime.kernel(name, UNKNOWN, call=call)
        out = executor.launch(kernel, held)
        if not returns:
            return None
        return wrap(out) if isinstance(out, torch.Tensor) else [wrap(o) for o in out]

    return handler


def duration(costs: Costs, work: Work, args: Sequence[Any]) -> int:
    """A kernel's time in ns, with flops at the rate of its first floating argument."""
    types = (arg.dtype for arg in args if type(arg) is torch.Tensor and arg.dtype.is_floating_point)
    return costs.work(work, next(types, torch.float32) if work.flops else torch.float32)


def _passed(arg: Any) -> Any:
    """What the kernel receives for an argument that is no device tensor. It may also read pinned host memory, and take
    empty host tensors."""
    if isinstance(arg, (list, tuple)):
        return [item.held if type(item) is DeviceTensor else _passed(item) for item in arg]
    if type(arg) in HOST_TENSORS and arg.dim() and arg.numel() and not is_pinned(arg):
        refuse_mixed(arg.device)
    return arg


class InterpretedKernel(TimedByValues, VisitingKernel, Protocol):
    def run(self) -> None:
        """Compute the kernel on the values that its arguments hold now."""


def launch_interpreted(kernel: InterpretedKernel, arguments: Sequence[torch.Tensor]) -> None:
    """Launch the kernel on the current stream of the open virtual GPU. In a graph it is computed at each replay.

    ``arguments`` are those in device memory and in pinned memory; the kernel itself may only keep the memory that holds
    their values, since a graph does not keep its inputs.
    """
    gpu = CURRENT.get()
    runtime = gpu.runtime
    call = runtime.kernel_call

    def run(reached: object) -> None:  # noqa: ARG001
        kernel.run()

    run.__name__ = kernel.name
    with gpu.watcher.visiting(kernel, arguments):
        # The program may free memory, whose address the kernel has, before pending work is done.
        reached = () if gpu.executor.eager or runtime.capture is not None else kernel.storages()
        gpu.executor.mutate(run, (reached,), {})
        if runtime.capture is not None:
            runtime.capture.variable(kernel, ())
        elif kernel.cost is None or not gpu.executor.eager:
            runtime.kernel(kernel.name, UNKNOWN, call=call)
        else:
            work = kernel.cost()
            time = runtime.costs.work(work, torch.float32)
            runtime.kernel(kernel.name, time, host_size=work.host_bytes, call=call)
