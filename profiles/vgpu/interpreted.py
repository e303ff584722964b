"""Kernels of other languages, whose accesses and time are known only once they were computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..platform.machine import VisitingKernel
from .custom import UNKNOWN
from .device import CURRENT
from .runtime import TimedByValues


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

    def run(reached: object) -> None:  # noqa: ARG001
        kernel.run()

    run.__name__ = kernel.name
    with gpu.watcher.visiting(kernel, arguments):
        # The program may free memory, whose address the kernel has, before pending work is done.
        reached = () if gpu.executor.eager or runtime.capture is not None else kernel.storages()
        gpu.executor.mutate(run, (reached,), {})
        if runtime.capture is not None:
            runtime.capture.variable(kernel, (), {})
        elif kernel.cost is None or not gpu.executor.eager:
            runtime.kernel(kernel.name, UNKNOWN)
        else:
            work = kernel.cost()
            time = runtime.costs.work(work, torch.float32)
            runtime.kernel(kernel.name, time, host_size=work.host_bytes)
