"""``torch.cuda`` answered by a virtual GPU, for a program that was written for CUDA.

The device ``"cuda"`` is the virtual GPU in all that torch's functions take, and a tensor there has ``is_cuda`` and the
device ``cuda:0``. A function of ``torch.cuda`` that is not answered raises AttributeError, in every build of torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import wraps
from itertools import chain
from typing import Any, Final, cast

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

from ..platform.hardware import HardwareProfile
from ..vgpu.device import VirtualGpu
from ..vgpu.host_time import wrapped_entries
from ..vgpu.patching import attributes_set
from ..vgpu.streams import Event, Stream
from ..vgpu.tensor import DeviceTensor
from .autocast import autocast_patches
from .checkpoints import loaded, saved
from .cuda_module import accelerator, cuda_module
from .cuda_program import CUDA, CudaDeviceNames, CudaProgram


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
    a time enters the virtual GPU, each with a current stream of its own. Calls without a line of the program in their
    thread are those of the line that started the thread, or its task. What the program has set, such as a default
    device, does not apply inside: the values of a device tensor are host tensors."""
    start, context, runtime = threading.Thread.start, copy_context(), gpu.runtime
    submit = ThreadPoolExecutor.submit
    lock, last = threading.RLock(), threading.get_ident()
    streams = {last: runtime.stream}

    @wraps(start)
    def started(thread: threading.Thread) -> None:
        body = from_here(thread.run)

        def run() -> None:
            with CudaDeviceNames(gpu):
                context.copy().run(body)

        thread.run = run  # type: ignore[method-assign]
        start(thread)

    def submitted(pool: ThreadPoolExecutor, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return submit(pool, from_here(function), *args, **kwargs)

    def from_here(function: Callable[..., Any]) -> Callable[..., Any]:
        line = here()

        def task(*args: Any, **kwargs: Any) -> Any:
            runtime.sites.started.line = line
            return function(*args, **kwargs)

        return task

    def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            nonlocal last
            with lock, torch._C.DisableTorchFunction():
                thread = threading.get_ident()
                if thread != last:
                    streams[last] = runtime.stream
                    runtime.stream = streams.get(thread, runtime.default)
                    last = thread
                return function(*args, **kwargs)

        return entered

    here = one_at_a_time(runtime.sites.here)
    yield threading.Thread, "start", started
    yield ThreadPoolExecutor, "submit", submitted
    yield from wrapped_entries(one_at_a_time)


CUDA_VERSION: Final = "12.9"


def torch_functions(program: CudaProgram, names: CudaDeviceNames) -> Iterator[tuple[Any, str, Any]]:
    """Torch's own functions that take a device without torch's function modes, or would use the hardware otherwise."""
    module_of, set_default = torch.get_device_module, torch.set_default_device
    default, original = torch.get_default_device, cast(Any, torch.Generator)

    def generator(device: Any = "cpu") -> Any:
        """Torch's own: the virtual GPU draws its random numbers from the host's generators."""
        return original("cpu" if torch.device(device).type == "cuda" else device)

    def get_default_device() -> torch.device:
        found: torch.device = default()
        return CUDA if found == names.placed(CUDA) else found

    yield torch.version, "cuda", CUDA_VERSION
    yield torch, "Generator", _standing_for(original, generator)
    yield torch, "Stream", _standing_for(torch.Stream, _emulated(torch.Stream, Stream, names), Stream)
    yield torch, "Event", _standing_for(torch.Event, _emulated(torch.Event, Event, names), Event)
    yield from autocast_patches()
    yield torch, "get_device_module", lambda device=None: torch.cuda if device is None else module_of(device)
    yield torch, "set_default_device", lambda device: set_default(names.placed(device))
    yield torch, "get_default_device", get_default_device
    for module in (_foreach_utils, optimizer):  # CUDA's optimizers update all parameters by one kernel
        yield module, "_foreach_supported_types", [*module._foreach_supported_types, DeviceTensor]
    yield torch, "save", saved(torch.save)
    yield torch, "load", loaded(torch.load, names)
    yield torch, "compile", _uncompiled(program)
    yield torch.compiler, "cudagraph_mark_step_begin", lambda: None
    yield (
        torch.nn.Module,
        "compile",
        lambda module, *_, **__: program.uncompiled.add(type(module).__qualname__),
    )


def _standing_for(original: type, make: Callable[..., Any], *others: type) -> type:
    """A class that makes objects by ``make``, and whose instances are those of the original and of the others."""

    class Standing(type):
        """The class's own class."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (original, *others))

    return Standing(original.__name__, (), {"__doc__": original.__doc__})


def _emulated(original: Any, emulated: Any, names: CudaDeviceNames) -> Callable[..., Any]:
    """A stream or event of the accelerator, which is the virtual GPU, or of the device that is named."""

    def make(device: Any = None, **options: Any) -> Any:
        if device is not None and names.placed(device) is device:
            return original(device, **options)
        return emulated(**options)

    return make


def _uncompiled(program: CudaProgram) -> Callable[..., Any]:
    def compile(model: Any = None, **_: Any) -> Any:
        """The model or the function itself."""
        if model is None:
            return compile
        program.uncompiled.add(getattr(model, "__qualname__", type(model).__qualname__))
        return model

    return compile
