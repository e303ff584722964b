"""The virtual GPU as a record of its parts, and the one that is open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Literal, NoReturn, Protocol, cast

import torch

from ..platform.machine import Watcher
from ..record.result import HazardFinding
from ..record.timeline import Site
from .addresses import AddressTable
from .executor import Executor
from .observer import HostObserver, VirtualClock
from .runtime import Runtime
from .torch_ops import Handler

GraphTrace = Literal["graph", "node"]


class DeviceCopies(Protocol):
    def copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy between host and device, or within the device."""


class HandlerTable(Protocol):
    """The handlers of ops, by the overload's id."""

    @property
    def copies(self) -> DeviceCopies: ...

    @property
    def direct(self) -> Mapping[int, Handler]:
        """Those of custom kernels that were called before, by the op's id."""

    def get(self, op: int, /) -> Handler | None: ...

    def build(self, func: torch._ops.OpOverload) -> Handler:
        """Make the handler of an overload that is called for the first time."""


class VirtualGpu:
    """A device, its host's clock, and the timeline of both. ``sites`` and ``streams`` resolve the numbers in the
    timeline's records."""

    def __init__(
        self,
        runtime: Runtime,
        executor: Executor,
        watcher: Watcher,
        handlers: Callable[[VirtualGpu], HandlerTable],
    ) -> None:
        self.device = device()
        self.capabilities = runtime.hardware.capabilities
        self.graph_trace: GraphTrace = "graph"
        self.runtime = runtime
        self.addresses = AddressTable()
        self.clock = VirtualClock(runtime)
        self.observer = HostObserver(runtime)
        self.watcher = watcher
        self.executor = executor
        self.handlers = handlers(self)

    @property
    def sites(self) -> Sequence[Site]:
        return self.runtime.sites.resolved()

    @property
    def streams(self) -> dict[int, str]:
        return self.observer.streams

    def flush(self) -> None:
        """Finish the device's work and deliver the rest of the timeline, at the end of a run. The clock stays."""
        self.runtime.flush()

    @property
    def findings(self) -> tuple[HazardFinding, ...]:
        """The hazards found so far; none unless the virtual GPU was opened with ``hazards``."""
        return self.watcher.found(self.sites, self.streams)


class Absent:
    """Stands for a virtual GPU that cannot be used. Every use raises RuntimeError with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(self._reason)


_NONE_OPEN = cast("VirtualGpu", Absent("no virtual GPU is open"))
CURRENT: ContextVar[VirtualGpu] = ContextVar("vgpu", default=_NONE_OPEN)


@cache
def device() -> torch.device:
    """The device, once its name is registered."""
    return torch.device("vgpu", 0)
