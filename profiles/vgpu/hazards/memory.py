"""The protocols through which the checker reads a device's tensors and the program's order."""

from __future__ import annotations

from typing import Protocol

import torch

from ..sites import LastSite
from .clocks import VectorClocks
from .footprints import ByteSpan
from .shadow import Block


class DeviceMemory(Protocol):
    """Reads the tensors of a device without the program noticing it."""

    @property
    def lasting(self) -> bool:
        """Whether values may be kept and read later without keeping device memory allocated."""

    def on_device(self, value: object) -> bool:
        """Whether the value is a tensor on the device."""

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in memory that the device may access at any time."""

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in the same geometry, as an argument for a kernel's footprint."""

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The tensor's block, if ``keep`` was called."""

    def keep(self, tensor: torch.Tensor, block: Block) -> None:
        """Keep the block alive for as long as it can be reached through this tensor or its views."""

    def span(self, tensor: torch.Tensor) -> ByteSpan:
        """The bytes of a tensor that has a block."""


class StreamNumber(Protocol):
    @property
    def id(self) -> int: ...


class HostProgram(Protocol):
    """The program that issues operations: its clocks, its source lines and its current stream."""

    @property
    def clocks(self) -> VectorClocks: ...

    @property
    def sites(self) -> LastSite: ...

    @property
    def stream(self) -> StreamNumber: ...
