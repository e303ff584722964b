"""How a rank's tensors get off its device and onto it, where links carry the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..vgpu import VirtualGpu
from ..vgpu.carriage import depart, land


class Ports(Protocol):
    def out(self, tensors: Sequence[torch.Tensor], name: str) -> Sequence[torch.Tensor]:
        """Values on the host, after what the current stream has been given so far."""

    def into(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Tensors of the device, for the current stream."""


class VirtualPorts:
    """Of a virtual GPU, whose link takes no time: what the network needs is no part of what is emulated."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._queue = gpu.runtime.simulation.queue()
        gpu.observer.streams[self._queue.id] = "link"

    def out(self, tensors: Sequence[torch.Tensor], name: str) -> Sequence[torch.Tensor]:
        values, _ = depart(self._gpu, self._queue, tensors, 0, name=name)
        return values

    def into(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return land(self._gpu, values, None)


class CopyingPorts:
    """Of a real device: through the host, by copies that it waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def out(self, tensors: Sequence[torch.Tensor], name: str) -> Sequence[torch.Tensor]:  # noqa: ARG002
        return [tensor.cpu() for tensor in tensors]

    def into(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(value.to(self._device) for value in values)
