"""The answers of ``torch.cuda``, its submodules and ``torch.accelerator``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import BuiltinFunctionType, ModuleType
from typing import Any, Final, NoReturn

import torch

from ..platform.hardware import HardwareProfile
from ..vgpu.device import VirtualGpu
from ..vgpu.streams import Event, Stream, StreamContext
from .cuda_program import CUDA, CudaDeviceNames, CudaProgram

Patch = tuple[Any, str, Any]
MEBIBYTE: Final = 1 << 20
_SUBMODULES: Final = ("graphs", "memory", "profiler", "random", "streams")
_NCCL: Final = (2, 27, 3)
_CYCLES_PER_NS: Final = 2  # of torch.cuda._sleep: the clock of a recent GPU, which profiles do not have


def _unanswered(*of: Any) -> NoReturn:
    raise AttributeError(f"{of[-1]} is not answered by the virtual GPU")


def _refused() -> Iterator[Patch]:
    """What would use the machine's own GPU: functions that only a build of torch with CUDA has, and classes."""
    found = [name for name, value in vars(torch._C).items() if isinstance(value, BuiltinFunctionType)]
    calls = [(torch._C, name) for name in found if name.startswith("_cuda_")]
    for owner, name in (*calls, (torch.cuda, "ExternalStream"), (torch.cuda, "MemPool")):
        yield owner, name, lambda *_, of=name, **__: _unanswered(of)


class _Cudart:
    """The runtime's calls that start and stop a profiler."""

    cudaProfilerStart = cudaProfilerStop = staticmethod(lambda: 0)  # noqa: N815 (CUDA's names)
    __getattr__ = _unanswered


class DeviceProperties:
    """What ``torch.cuda.get_device_properties`` returns. What the hardware profile does not have is the same for all
    GPUs since compute capability 8.0."""

    warp_size = 32
    regs_per_multiprocessor = 65536
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    shared_memory_per_block = 48 << 10
    is_integrated = is_multi_gpu_board = 0
    uuid = "00000000-0000-0000-0000-000000000000"
    pci_bus_id = pci_device_id = pci_domain_id = 0

    def __init__(self, hardware: HardwareProfile) -> None:
        gpu = hardware.gpu
        self.name = self.gcnArchName = f"{hardware.name} (virtual)"
        self.major, self.minor = gpu.major, gpu.minor
        self.total_memory = gpu.memory_mib * MEBIBYTE
        self.multi_processor_count = gpu.multiprocessors
        self.L2_cache_size = gpu.l2_cache_mib * MEBIBYTE
        self.shared_memory_per_multiprocessor = gpu.shared_memory_kib << 10
        self.shared_memory_per_block_optin = (gpu.shared_memory_kib - 1) << 10


def cuda_module(
    gpu: VirtualGpu, program: CudaProgram, names: CudaDeviceNames, hardware: HardwareProfile
) -> Iterator[Patch]:
    """The attributes of ``torch.cuda`` and of its submodules. The virtual GPU's own are looked up as they are then."""
    properties = DeviceProperties(hardware)
    answers = {**_devices(names, properties), **_work(gpu), **_constants(program, properties)}
    yield from _answered(answers, torch.cuda, *(getattr(torch.cuda, name) for name in _SUBMODULES))
    yield torch._C, "__getattr__", _unanswered
    yield from _refused()
    for attribute in ("range_start", "range_end", "range_push", "range_pop", "mark"):
        yield torch.cuda.nvtx, attribute, getattr(program, attribute)
    yield torch.cuda.nccl, "version", program.default("torch.cuda.nccl.version", _NCCL)
    yield torch.backends.cuda, "is_built", lambda: True
    for owner in (Stream, Event):
        yield owner, "device", property(lambda _: CUDA)


def _answered(answers: Mapping[str, Any], module: ModuleType, *submodules: ModuleType) -> Iterator[Patch]:
    """Each answer as an attribute of the module, and of those submodules that have the attribute."""
    for attribute, answer in answers.items():
        yield module, attribute, answer
        yield from ((other, attribute, answer) for other in submodules if hasattr(other, attribute))


def _devices(names: CudaDeviceNames, properties: DeviceProperties) -> Mapping[str, Any]:
    class Device(nullcontext[None]):
        """A context in which the only GPU is the current one. Raises RuntimeError for another."""

        idx = 0

        def __init__(self, device: Any) -> None:
            super().__init__()
            names.placed(device)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: names.placed(device) and None,
        "device": Device,
        "device_of": lambda _: Device(0),
        "can_device_access_peer": lambda *_: False,
        "get_device_name": lambda *_: properties.name,
    }


def _work(gpu: VirtualGpu) -> Mapping[str, Any]:
    """Streams, events, graphs and random numbers."""
    module: Any = torch.get_device_module(gpu.device)
    same = (
        "CUDAGraph",
        "graph",
        "graph_pool_handle",
        "current_stream",
        "default_stream",
        "set_stream",
        "synchronize",
    )
    return {
        **{name: getattr(module, name) for name in same},
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "is_current_stream_capturing": lambda: gpu.runtime.capture is not None,
        "cudart": _Cudart,
        # The virtual GPU draws its random numbers from the host's generator.
        "default_generators": (torch.default_generator,),
        "_sleep": lambda cycles: gpu.runtime.kernel("spin_kernel", cycles // _CYCLES_PER_NS),
        "check_error": lambda _: None,
    }


def _constants(program: CudaProgram, properties: DeviceProperties) -> Mapping[str, Any]:
    """The queries whose result is a constant."""
    values: dict[str, Any] = {
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_properties": properties,
        "get_arch_list": [f"sm_{properties.major}{properties.minor}"],
        "mem_get_info": (properties.total_memory, properties.total_memory),
        "set_per_process_memory_fraction": None,
        "ipc_collect": None,
        "memory_snapshot": [],
        "memory_summary": "",
        "host_memory_stats": Counter[str](),
        "_record_memory_history": None,
        "get_allocator_backend": "native",
        "set_sync_debug_mode": None,
        "get_sync_debug_mode": 0,
        **_MEMORY,
    }
    return {name: program.default(f"torch.cuda.{name}", value) for name, value in values.items()}


_MEMORY: Final[Mapping[str, Any]] = {
    "empty_cache": None,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "memory_stats": Counter[str](),
    "reset_accumulated_memory_stats": None,
    "reset_peak_memory_stats": None,
}


def accelerator(gpu: VirtualGpu, program: CudaProgram, names: CudaDeviceNames) -> Iterator[Patch]:
    """The attributes of ``torch.accelerator``, by those that ``torch.cuda`` has already."""
    module: Any = torch.get_device_module(gpu.device)
    answers = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),  # noqa: ARG005
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": lambda device: names.placed(device) and None,
        "set_device_idx": lambda device: names.placed(device) and None,
        "device_index": torch.cuda.device,
        "current_stream": module.current_stream,
        "set_stream": module.set_stream,
        "synchronize": module.synchronize,
        "get_memory_info": torch.cuda.mem_get_info,
        "empty_host_cache": lambda: None,
        **{name: program.default(f"torch.accelerator.{name}", value) for name, value in _MEMORY.items()},
    }
    yield from _answered(answers, torch.accelerator, torch.accelerator.memory)
