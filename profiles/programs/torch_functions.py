"""Torch's own functions that take a device without torch's function modes, or would use the hardware otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

from ..vgpu.streams import Event, Stream
from ..vgpu.tensor import DeviceTensor
from .autocast import autocast_patches
from .cuda_program import CudaProgram
from .device_names import CUDA, CudaDeviceNames

CUDA_VERSION: Final = "12.9"


def torch_functions(program: CudaProgram, names: CudaDeviceNames) -> Iterator[tuple[Any, str, Any]]:
    yield torch.version, "cuda", CUDA_VERSION
    yield torch, "Generator", _standing_for(torch.Generator, _generator(torch.Generator))
    yield torch, "Stream", _standing_for(torch.Stream, _emulated(torch.Stream, Stream, names), Stream)
    yield torch, "Event", _standing_for(torch.Event, _emulated(torch.Event, Event, names), Event)
    yield from autocast_patches()
    yield from _device_functions(
        names, torch.get_device_module, torch.set_default_device, torch.get_default_device
    )
    for module in (_foreach_utils, optimizer):  # CUDA's optimizers update all parameters by one kernel
        yield module, "_foreach_supported_types", [*module._foreach_supported_types, DeviceTensor]
    yield torch, "load", _loaded(torch.load, names)
    yield torch, "compile", _uncompiled(program)
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


def _generator(original: Any) -> Callable[..., Any]:
    """Torch's own: the virtual GPU draws its random numbers from the host's generators."""

    def generator(device: Any = "cpu") -> torch.Generator:
        made: torch.Generator = original("cpu" if torch.device(device).type == "cuda" else device)
        return made

    return generator


def _emulated(original: Any, emulated: Any, names: CudaDeviceNames) -> Callable[..., Any]:
    """A stream or event of the accelerator, which is the virtual GPU, or of the device that is named."""

    def make(device: Any = None, **options: Any) -> Any:
        if device is not None and names.placed(device) is device:
            return original(device, **options)
        return emulated(**options)

    return make


def _device_functions(
    names: CudaDeviceNames,
    module_of: Callable[..., Any],
    set_default: Callable[..., None],
    default: Callable[[], Any],
) -> Iterator[tuple[Any, str, Any]]:
    """Torch's own, given and returning CUDA devices."""

    def get_default_device() -> torch.device:
        found: torch.device = default()
        return CUDA if found == names.placed(CUDA) else found

    yield torch, "get_device_module", lambda device=None: torch.cuda if device is None else module_of(device)
    yield torch, "set_default_device", lambda device: set_default(names.placed(device))
    yield torch, "get_default_device", get_default_device


def _loaded(original: Callable[..., Any], names: CudaDeviceNames) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        """Each tensor is copied to the virtual GPU after it was read, if that is the location for all."""
        device = names.placed(map_location)
        if device is map_location:
            return original(f, map_location, *args, **options)
        return _moved(original(f, "cpu", *args, **options), device)

    return load


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return value.to(device)
    if isinstance(value, dict):
        value.update({key: _moved(part, device) for key, part in value.items()})
    elif isinstance(value, list):
        value[:] = [_moved(part, device) for part in value]
    return tuple(_moved(part, device) for part in value) if type(value) is tuple else value


def _uncompiled(program: CudaProgram) -> Callable[..., Any]:
    def compile(model: Any = None, **_: Any) -> Any:
        """The model or the function itself."""
        if model is None:
            return compile
        program.uncompiled.add(getattr(model, "__qualname__", type(model).__qualname__))
        return model

    return compile
