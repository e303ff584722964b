"""``torch.cuda`` answered by a virtual GPU, for a program that was written for CUDA.

The device ``"cuda"`` is the virtual GPU in all that torch's functions take, and a tensor there has ``is_cuda`` and the
device ``cuda:0``. What is not answered here is torch's own, which says that this build of torch has no CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import wraps
from itertools import chain
from typing import Any

import torch

from ..platform.hardware import HardwareProfile
from ..vgpu.device import VirtualGpu
from ..vgpu.host_time import wrapped_entries
from ..vgpu.patching import attributes_set
from .cuda_module import accelerator, cuda_module
from .cuda_program import CudaProgram
from .device_names import CudaDeviceNames
from .torch_functions import torch_functions


@contextmanager
def cuda_answered(gpu: VirtualGpu, hardware: HardwareProfile) -> Iterator[CudaProgram]:
    """Answer ``torch.cuda`` by ``gpu``, which is of that hardware, until the block ends. Gradients are computed on the
    calling thread, and threads that the program starts use the same virtual GPU, one at a time."""
    program = CudaProgram(gpu)
    names = CudaDeviceNames(gpu)
    module = chain(cuda_module(gpu, program, names, hardware), accelerator(gpu, program, names))
    with (
        attributes_set(chain(_threads(gpu), module, torch_functions(program, names))),
        torch.autograd.set_multithreading_enabled(False),
        names,
    ):
        yield program


def _threads(gpu: VirtualGpu) -> Iterator[tuple[Any, str, Any]]:
    """New threads have the opener's context, in which the virtual GPU is open, and its names of devices. One thread at
    a time enters the virtual GPU, each with a current stream of its own."""
    start, context = threading.Thread.start, copy_context()

    @wraps(start)
    def started(thread: threading.Thread) -> None:
        body = thread.run

        def run() -> None:
            with CudaDeviceNames(gpu):
                context.copy().run(body)

        thread.run = run  # type: ignore[method-assign]
        start(thread)

    yield threading.Thread, "start", started
    yield from wrapped_entries(ThreadTurns(gpu).one_at_a_time)


class ThreadTurns:
    """Lets one thread at a time enter the virtual GPU, and keeps the current stream of each. What the program has set,
    such as a default device, does not apply inside: the values of a device tensor are host tensors."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._runtime = gpu.runtime
        self._lock = threading.RLock()
        self._last = threading.get_ident()
        self._streams = {self._last: gpu.runtime.stream}

    def one_at_a_time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            with self._lock, torch._C.DisableTorchFunction():
                thread = threading.get_ident()
                if thread != self._last:
                    self._streams[self._last] = self._runtime.stream
                    self._runtime.stream = self._streams.get(thread, self._runtime.default)
                    self._last = thread
                return function(*args, **kwargs)

        return entered
