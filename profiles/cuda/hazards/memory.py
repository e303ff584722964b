"""A real device's memory for the hazard checker: a storage is a block, freed with the last tensor on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...vgpu.hazards.footprints import ByteSpan, span
from ...vgpu.hazards.shadow import Block

_BLOCK = "_schedbench_block"  # attribute of a storage's Python object, which exists as long as the storage


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class StorageMemory:
    """Tensors of the device type ``type``. No references to tensors are kept, since they would keep blocks from being
    freed. ``real`` returns the tensor that has the storage, if that is another one."""

    type: str
    real: Callable[[torch.Tensor], torch.Tensor] = itself
    lasting: bool = False

    def on_device(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self.type

    def pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.real(tensor)

    def block(self, tensor: torch.Tensor) -> Block | None:
        return getattr(self.real(tensor).untyped_storage(), _BLOCK, None)

    def keep(self, tensor: torch.Tensor, block: Block) -> None:
        setattr(self.real(tensor).untyped_storage(), _BLOCK, block)

    def span(self, tensor: torch.Tensor) -> ByteSpan:
        return span(self.real(tensor))
