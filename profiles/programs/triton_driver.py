"""The queries of programs to Triton's driver about the GPU, with the results of ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch


class TritonDriver:
    """Stands for Triton's active driver, which there is none of without a GPU."""

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> Any:
        major, minor = torch.cuda.get_device_capability()
        target: Any = import_module("triton.backends.compiler").GPUTarget
        return target("cuda", 10 * major + minor, torch.cuda.get_device_properties(0).warp_size)

    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        properties: Any = torch.cuda.get_device_properties(device)
        return {
            "max_num_regs": properties.regs_per_multiprocessor,
            "max_shared_mem": properties.shared_memory_per_block_optin,
            "multiprocessor_count": properties.multi_processor_count,
            "warpSize": properties.warp_size,
        }

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:  # noqa: ARG002
        return torch.cuda.current_stream().cuda_stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


def driver_patches(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Of Triton's module ``runtime.driver``."""
    yield module.driver, "_active", TritonDriver()
