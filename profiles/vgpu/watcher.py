"""Who is told of memory: of what dispatch alone does not show. A hazard checker listens; usually nobody does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from ..record.timeline import Site

if TYPE_CHECKING:
    from .graph import GraphCapture
    from .hazards.findings import Finding
    from .tensor import DeviceTensor


class Watcher(Protocol):
    @property
    def spent(self) -> int:
        """Nanoseconds of this process's time that watching took so far."""

    def listening(self) -> AbstractContextManager[None]:
        """Around everything that happens on the virtual GPU."""

    def made(self, tensor: DeviceTensor) -> None:
        """New memory, or a view, and nothing launched."""

    def host_access(self, op: str, tensor: torch.Tensor, *, write: bool) -> None:
        """The host itself looks at, or changes, pinned memory."""

    def sent(self, tensor: DeviceTensor) -> None:
        """A link takes the values on the current stream."""

    def generated(self, op: str, tensor: DeviceTensor) -> None:
        """``op`` launched a kernel that writes new memory."""

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Call the tensor's memory so from now on."""

    def record_stream(self, tensor: DeviceTensor, queue: int) -> None: ...

    def capturing(self, capture: GraphCapture | None) -> None:
        """From now on operations are nodes of that graph; None: they are operations again."""

    def replaying(self, capture: GraphCapture) -> AbstractContextManager[None]:
        """Around the computation of a graph that is launched."""

    def found(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[Finding, ...]:
        """Accesses that nothing orders."""

    def unread(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[Finding, ...]:
        """Named memory that was written and never read."""


class NoWatcher:
    spent = 0
    _nothing: AbstractContextManager[None] = nullcontext()

    def listening(self) -> AbstractContextManager[None]:
        return self._nothing

    def made(self, tensor: DeviceTensor) -> None: ...

    def host_access(self, op: str, tensor: torch.Tensor, *, write: bool) -> None: ...

    def sent(self, tensor: DeviceTensor) -> None: ...

    def generated(self, op: str, tensor: DeviceTensor) -> None: ...

    def name(self, tensor: torch.Tensor, name: str) -> None: ...

    def record_stream(self, tensor: DeviceTensor, queue: int) -> None: ...

    def capturing(self, capture: GraphCapture | None) -> None: ...

    def replaying(self, capture: GraphCapture) -> AbstractContextManager[None]:  # noqa: ARG002
        return self._nothing

    def found(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[Finding, ...]:  # noqa: ARG002
        return ()

    def unread(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[Finding, ...]:  # noqa: ARG002
        return ()
