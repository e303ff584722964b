"""Registers the device name ``vgpu`` with torch, and the few kernels that torch needs to make tensors on it.

A registration lasts for the rest of the process and breaks CUDA's pinned memory, so it happens when the first virtual
GPU is opened, never at import and never beside CUDA. This is the only module that uses torch's experimental
registration. Everything that is registered looks up the virtual GPU that is open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch._library import simple_registry
from torch.utils import backend_registration

from ..platform.own_process import is_claimed
from . import streams
from .device import CURRENT
from .factories import generated, new, zeros
from .graph import CUDAGraph, graph, graph_pool_handle
from .tensor import DeviceTensor

_DTENSOR_MODULE: Final = "torch.distributed.tensor"
_GENERATED = (
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "eye",
    "eye.m",
    "randperm",
    "tril_indices",
    "triu_indices",
)


class DeviceModule:
    """What ``torch.get_device_module("vgpu")`` returns."""

    Stream = streams.Stream
    green_contexts = SimpleNamespace(GreenContext=streams.GreenContext)
    Event = streams.Event
    CUDAGraph = CUDAGraph
    graph = graph
    graph_pool_handle = staticmethod(graph_pool_handle)
    StreamContext = streams.StreamContext
    stream = streams.StreamContext

    def current_stream(self, device: Any = None) -> streams.Stream:  # noqa: ARG002
        return streams.Stream(queue=CURRENT.get().runtime.stream)

    def default_stream(self, device: Any = None) -> streams.Stream:  # noqa: ARG002
        return streams.Stream(queue=CURRENT.get().runtime.default)

    def set_stream(self, stream: streams.Stream) -> None:
        CURRENT.get().runtime.stream = stream.queue

    def synchronize(self, device: Any = None) -> None:  # noqa: ARG002
        CURRENT.get().runtime.synchronize_device()

    def is_available(self) -> bool:
        return CURRENT.get(None) is not None

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """The device draws its random numbers from the host's generator."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:  # noqa: ARG002
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:  # noqa: ARG002
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1


@cache
def register() -> object:
    """Give the process the device ``vgpu``, once. Raises RuntimeError beside an initialised CUDA. A process that runs
    nothing else cannot compute with a ``DTensor`` afterwards."""
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA is in use in this process and a virtual GPU would break its pinned memory; "
            "emulate in a process of its own"
        )
    backend_registration._setup_privateuseone_for_python_backend("vgpu", backend_module=DeviceModule())
    simple_registry.find_torch_dispatch_rule = _rule(simple_registry.find_torch_dispatch_rule)  # type: ignore[assignment]
    if is_claimed():
        _answer_dtensor_question()
    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty, "PrivateUse1")
    library.impl("zeros", _zeros, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", _local_scalar_dense, "PrivateUse1")
    for name in _GENERATED:
        library.impl(name, _generator(name), "PrivateUse1")
    return library


class _Unanswered(torch.Tensor):
    """A tensor whose operations return nothing."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None: ...


def _rule(find: Callable[[Any, type], Any]) -> Callable[[Any, type], Any]:
    """``find`` with the answer for device tensors, to which no rule for a single op applies. Torch calls at every op
    what has this name at the first one of the process."""
    return lambda op, kind: None if kind is DeviceTensor else find(op, kind)


def _answer_dtensor_question() -> None:
    """Let torch's dispatcher take an empty class for ``DTensor``. At the first operation on a tensor subclass it asks
    for that class, once in a process, and the import takes longer than all others behind torch's own: 0.8 s of torch
    2.13, sympy included. Does nothing where the module is imported already."""
    if _DTENSOR_MODULE in sys.modules:
        return
    module = ModuleType(_DTENSOR_MODULE)
    module.DTensor = type("DTensor", (), {})  # type: ignore[attr-defined]
    sys.modules[_DTENSOR_MODULE] = module
    try:
        torch.ops.aten.detach.default(torch.Tensor._make_wrapper_subclass(_Unanswered, (1,)))
    finally:
        del sys.modules[_DTENSOR_MODULE]


def _empty(
    size: Sequence[int], stride: Sequence[int] | None = None, *, dtype: torch.dtype | None = None, **_: Any
) -> DeviceTensor:
    return new(CURRENT.get(), size, stride, dtype)


def _zeros(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> DeviceTensor:
    return zeros(CURRENT.get(), size, dtype)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    CURRENT.get().handlers.copies.copy(target, source, non_blocking=non_blocking)
    return target


def _local_scalar_dense(tensor: DeviceTensor) -> Any:
    func = torch.ops.aten._local_scalar_dense.default
    handlers = CURRENT.get().handlers
    return (handlers.get(id(func)) or handlers.build(func))((tensor,), {})


def _generator(name: str) -> Callable[..., DeviceTensor]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")._op

    def handler(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> DeviceTensor:
        return generated(CURRENT.get(), packet, op(*args, dtype=dtype))

    return handler
