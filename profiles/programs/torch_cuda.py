"""``torch.cuda`` answered by a virtual GPU, for a program that was written for CUDA.

The device ``"cuda"`` is the virtual GPU in all that torch's functions take, and a tensor there has ``is_cuda`` and the
device ``cuda:0``. What is not answered here is torch's own, which says that this build of torch has no CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import wraps
from itertools import chain
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ..captures.capture import CapturedRange
from ..vgpu import VirtualGpu
from ..vgpu.host_time import wrapped_entries
from ..vgpu.patching import attributes_set
from ..vgpu.streams import Event, Stream, StreamContext

CUDA: Final = torch.device("cuda", 0)
GIBIBYTE: Final = 1 << 30
_PLACED: Final = frozenset(
    {"to", "empty", "zeros", "ones", "full", "tensor", "as_tensor", "rand", "randn", "arange"}
)


class CudaDeviceNames(TorchFunctionMode):
    """Torch's functions with the virtual GPU wherever they are given a CUDA device, and with a CUDA device wherever
    they would return the virtual GPU."""

    def __init__(self, gpu: VirtualGpu) -> None:
        super().__init__()
        self._device = gpu.device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        if name == "cuda":
            return self._to_cuda(*args, **named)
        if name == "get_device":
            return 0 if args[0].device == self._device else func(*args)
        if "device" in named:
            named["device"] = self.placed(named["device"])
        if name in _PLACED:
            args = tuple(self.placed(arg) if isinstance(arg, (str, torch.device)) else arg for arg in args)
        return func(*args, **named)

    def _to_cuda(
        self, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **named: Any
    ) -> torch.Tensor:
        target = self._device if device is None else self.placed(device)
        return tensor.to(target, non_blocking=non_blocking, **named)

    def _attribute(self, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        attribute = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
        if attribute == "is_cuda":
            return args[0].device == self._device
        found = func(*args)
        return CUDA if attribute == "device" and found == self._device else found

    def placed(self, device: Any) -> Any:
        """The virtual GPU for the first CUDA device. Raises RuntimeError for others, as CUDA does."""
        if isinstance(device, int) and not isinstance(device, bool):
            device = torch.device("cuda", device)
        if not isinstance(device, (str, torch.device)) or torch.device(device).type != "cuda":
            return device
        if torch.device(device).index not in (None, 0):
            raise RuntimeError(
                f"invalid device ordinal: the virtual GPU is cuda:0, and {device} was asked for"
            )
        return self._device


class NvtxRanges:
    """The ranges and marks that the program makes by ``torch.cuda.nvtx``, on the virtual host's clock."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.closed: list[CapturedRange] = []
        self._clock = gpu.clock
        self._open: list[tuple[str, int]] = []

    def push(self, message: str) -> int:
        self._open.append((message, self._clock.now()))
        return len(self._open) - 1

    def pop(self) -> int:
        """Returns the depth of the range that ends, and -1 where none is open, as NVTX does."""
        if not self._open:
            return -1
        name, start = self._open.pop()
        self.closed.append(CapturedRange(name, start, self._clock.now(), 0))
        return len(self._open)

    def mark(self, message: str) -> None:
        now = self._clock.now()
        self.closed.append(CapturedRange(message, now, now, 0))

    @contextmanager
    def range(self, message: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.push(message.format(*args, **kwargs))
        try:
            yield
        finally:
            self.pop()


class CudaProgram:
    """What the program did with ``torch.cuda`` besides work for the device. ``defaults`` are the queries that were
    answered by a constant, since the virtual GPU has no such quantity."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.nvtx = NvtxRanges(gpu)
        self.defaults: set[str] = set()

    def default(self, name: str, value: Any) -> Callable[..., Any]:
        """A function that answers ``value``."""

        def answered(*args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
            self.defaults.add(f"torch.cuda.{name}")
            return value

        return answered

    def notes(self) -> list[str]:
        """What the result says about the defaults."""
        return [
            f"{name} has no counterpart and was answered with a constant" for name in sorted(self.defaults)
        ]


class DeviceProperties:
    """Of an H100 or H200, whose compute capability decides which code a program takes."""

    major, minor = 9, 0
    multi_processor_count = 132
    warp_size = 32
    total_memory = 80 * GIBIBYTE

    def __init__(self, name: str) -> None:
        self.name = name


@contextmanager
def cuda_answered(gpu: VirtualGpu, *, name: str) -> Iterator[CudaProgram]:
    """Answer ``torch.cuda`` by ``gpu``, the GPU called ``name``, until the block ends. Gradients are computed on the
    calling thread, and threads that the program starts use the same virtual GPU, one at a time."""
    program = CudaProgram(gpu)
    names = CudaDeviceNames(gpu)
    with (
        attributes_set(chain(_threads(gpu), _module(gpu, program, names, name), _torch())),
        torch.autograd.set_multithreading_enabled(False),
        names,
    ):
        yield program


def _module(
    gpu: VirtualGpu, program: CudaProgram, names: CudaDeviceNames, name: str
) -> Iterator[tuple[Any, str, Any]]:
    """Methods of the virtual GPU are looked up as they are after ``_threads``."""
    module: Any = torch.get_device_module(gpu.device)
    properties = DeviceProperties(f"{name} (virtual)")
    memory = (properties.total_memory, properties.total_memory)
    answers: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "CUDAGraph": module.CUDAGraph,
        "graph": module.graph,
        "graph_pool_handle": module.graph_pool_handle,
        "current_stream": module.current_stream,
        "default_stream": module.default_stream,
        "set_stream": module.set_stream,
        "synchronize": module.synchronize,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: gpu.runtime.capture is not None,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: names.placed(device) and None,
        "device": lambda device: nullcontext(names.placed(device)),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "get_rng_state": module.get_rng_state,
        "set_rng_state": module.set_rng_state,
        "get_device_name": lambda *_: properties.name,
        "is_bf16_supported": program.default("is_bf16_supported", True),
        "get_device_capability": program.default(
            "get_device_capability", (properties.major, properties.minor)
        ),
        "get_device_properties": program.default("get_device_properties", properties),
        "empty_cache": program.default("empty_cache", None),
        "mem_get_info": program.default("mem_get_info", memory),
        "memory_allocated": program.default("memory_allocated", 0),
        "memory_reserved": program.default("memory_reserved", 0),
        "max_memory_allocated": program.default("max_memory_allocated", 0),
        "max_memory_reserved": program.default("max_memory_reserved", 0),
        "reset_peak_memory_stats": program.default("reset_peak_memory_stats", None),
    }
    for attribute, answer in answers.items():
        yield torch.cuda, attribute, answer
    nvtx = program.nvtx
    for attribute, answer in (
        ("range_push", nvtx.push),
        ("range_pop", nvtx.pop),
        ("mark", nvtx.mark),
        ("range", nvtx.range),
    ):
        yield torch.cuda.nvtx, attribute, answer


def _torch() -> Iterator[tuple[Any, str, Any]]:
    """Torch's own functions that take a device without torch's function modes."""
    generator, autocast = torch.Generator, torch.autocast.__init__

    class HostGenerators(type):
        """Makes torch's own generators: the virtual GPU draws its random numbers from the host's."""

        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return generator("cpu" if torch.device(device).type == "cuda" else device)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, generator)

    class Generator(metaclass=HostGenerators):
        """Stands for ``torch.Generator``."""

    @wraps(autocast)
    def autocast_here(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        if device_type == "cuda" and enabled:
            raise RuntimeError(
                "torch.autocast is not available on the virtual GPU: its casts would not be counted"
            )
        autocast(self, "cpu" if device_type == "cuda" else device_type, dtype, enabled, cache_enabled)

    yield torch, "Generator", Generator
    yield torch.autocast, "__init__", autocast_here


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
    """Lets one thread at a time enter the virtual GPU, and keeps the current stream of each."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._runtime = gpu.runtime
        self._lock = threading.RLock()
        self._last = threading.get_ident()
        self._streams = {self._last: gpu.runtime.stream}

    def one_at_a_time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                thread = threading.get_ident()
                if thread != self._last:
                    self._streams[self._last] = self._runtime.stream
                    self._runtime.stream = self._streams.get(thread, self._runtime.default)
                    self._last = thread
                return function(*args, **kwargs)

        return entered
