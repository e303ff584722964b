"""What a program does with torch and CUDA besides work for the device, and the device that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ..captures.capture import CapturedRange
from ..vgpu import fused
from ..vgpu.device import VirtualGpu
from ..vgpu.hazards.ops import host_ops
from ..vgpu.tensor import DeviceTensor
from ..vgpu.watched import VirtualMemory


class CudaProgram:
    """What the program did with ``torch.cuda`` besides work for the device. ``ranges`` are the closed ranges and the
    marks that it made by ``torch.cuda.nvtx``, on the virtual host's clock. ``defaults`` are the queries that were
    answered by a constant, since the virtual GPU has no such quantity; ``uncompiled`` are what it gave to
    ``torch.compile``."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.ranges: list[CapturedRange] = []
        self.defaults: set[str] = set()
        self.uncompiled: set[str] = set()
        self._clock = gpu.clock
        self._started: list[tuple[str, int]] = []
        self._open: list[int] = []

    def range_start(self, message: str) -> int:
        self._started.append((message, self._clock.now()))
        return len(self._started) - 1

    def range_end(self, number: int) -> None:
        self.ranges.append(CapturedRange(*self._started[number], self._clock.now(), 0))

    def range_push(self, message: str) -> int:
        self._open.append(self.range_start(message))
        return len(self._open) - 1

    def range_pop(self) -> int:
        """Returns the depth of the range that ends, and -1 where none is open, as NVTX does."""
        if not self._open:
            return -1
        self.range_end(self._open.pop())
        return len(self._open)

    def mark(self, message: str) -> None:
        self.range_end(self.range_start(message))

    def default(self, name: str, value: Any) -> Callable[..., Any]:
        """A function that returns ``value``."""

        def answered(*args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
            self.defaults.add(name)
            return value

        return answered

    def notes(self) -> list[str]:
        """The notes of a result about them."""
        constant = "{} has no counterpart and was answered with a constant"
        kept = "torch.compile left {} as it is: each operator is a kernel"
        found = {constant: self.defaults, kept: self.uncompiled}
        return [note.format(name) for note, names in found.items() for name in sorted(names)]


_MEMORY: Final = VirtualMemory()
CUDA: Final = torch.device("cuda", 0)
_PLACED: Final = frozenset(
    {"to", "empty", "zeros", "ones", "full", "tensor", "as_tensor", "rand", "randn", "arange"}
)


# Functions that torch composes of others, except on CUDA.
_FUSED: Final = frozenset({"scaled_dot_product_attention", "rms_norm"})


class CudaDeviceNames(TorchFunctionMode):
    """Torch's functions with the virtual GPU wherever they are given a CUDA device, and with a CUDA device wherever
    they would return the virtual GPU."""

    def __init__(self, gpu: VirtualGpu) -> None:
        super().__init__()
        self._device, self._watcher = gpu.device, gpu.watcher

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
        if name == "type":
            return self._type(func, *args, **named)
        if "device" in named:
            named["device"] = self.placed(named["device"])
        if name in _PLACED:
            args = tuple(self.placed(arg) if isinstance(arg, (str, torch.device)) else arg for arg in args)
        if name in _FUSED and DeviceTensor in map(type, (*args, *named.values())):
            return fused.run_as_one_kernel(name, func, *args, **named)
        with host_ops(name, self._watcher, _MEMORY, (*args, *named.values())):
            return func(*args, **named)

    def _to_cuda(
        self, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **named: Any
    ) -> torch.Tensor:
        target = self._device if device is None else self.placed(device)
        return tensor.to(target, non_blocking=non_blocking, **named)

    def _type(self, func: Callable[..., Any], tensor: torch.Tensor, dtype: Any = None, **named: Any) -> Any:
        """The name of the tensor's type, or the tensor as another type, which may be one of CUDA's by name."""
        if dtype is None:
            return func(tensor).replace(f"torch.{self._device.type}.", "torch.cuda.")
        kind = dtype.removeprefix("torch.cuda.") if isinstance(dtype, str) else dtype
        if kind != dtype:
            return tensor.to(self._device, dtype=getattr(torch, kind).dtype, **named)
        return func(tensor, dtype, **named)

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
