"""How a checker looks at a device's tensors, and who tells it of order: all that it has to know of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ..pinned import is_pinned
from ..sites import Sites
from ..tensor import DeviceTensor
from .clocks import Clocks
from .footprints import ByteSpan, span

if TYPE_CHECKING:
    from .blocks import Block


class Memory(Protocol):
    """Tensors of a device, looked at without the program's noticing."""

    @property
    def lasting(self) -> bool:
        """Whether values may be looked at later: keeping them keeps no memory of the device's from being freed."""

    def mine(self, value: object) -> bool:
        """Whether it is a tensor on the device."""

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host lies where the device may touch it at any time."""

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in the same geometry, as an argument of a kernel's footprint."""

    def block(self, tensor: torch.Tensor) -> Block | None:
        """Its memory, if it was kept."""

    def keep(self, tensor: torch.Tensor, block: Block) -> None:
        """The block shall live as long as anyone can reach it by this tensor or its views."""

    def span(self, tensor: torch.Tensor) -> ByteSpan:
        """Of a tensor with a block."""


class Numbered(Protocol):
    @property
    def id(self) -> int: ...


class LastSite(Sites):
    """Remembers the source line of the last call."""

    last = -1

    def here(self) -> int:
        self.last = super().here()
        return self.last


class Program(Protocol):
    """Who issues operations, in what order."""

    @property
    def clocks(self) -> Clocks: ...

    @property
    def sites(self) -> LastSite: ...

    @property
    def stream(self) -> Numbered:
        """The current one."""


class VirtualMemory:
    """Of a virtual GPU: each tensor holds its values on the host, and dies by itself."""

    lasting = True

    def mine(self, value: object) -> bool:
        return type(value) is DeviceTensor

    def pinned(self, tensor: torch.Tensor) -> bool:
        return is_pinned(tensor)

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        assert type(tensor) is DeviceTensor
        return tensor.held

    def block(self, tensor: torch.Tensor) -> Block | None:
        try:
            return tensor.block  # type: ignore[attr-defined, no-any-return]
        except AttributeError:
            return None

    def keep(self, tensor: torch.Tensor, block: Block) -> None:
        assert type(tensor) is DeviceTensor
        tensor.block, tensor.span = block, span(tensor.held)

    def span(self, tensor: torch.Tensor) -> ByteSpan:
        return tensor.span  # type: ignore[attr-defined, no-any-return]
