"""The virtual GPU: everything put together, for the duration of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ... import sched
from ...sched.config import Capabilities
from ..hardware import HardwareProfile
from ..timeline import Sink, Site
from .copies import Copies
from .executor import EagerExecutor, Executor
from .handlers import Handlers
from .hazards.checker import Checker
from .hazards.copies import WatchedCopies
from .hazards.ops import WatchedHandlers
from .hazards.runtime import OrderedRuntime
from .indexing import Indexing
from .observer import HostObserver, VirtualClock
from .patches import installed
from .registration import register
from .runtime import Runtime
from .skipping import SkippingExecutor
from .tensor import CURRENT, DeviceTensor, device
from .watcher import Nobody, Watcher

if TYPE_CHECKING:
    from .graph import Capture
    from .hazards import Finding

Values = Literal["real", "none"]
GraphTrace = Literal["graph", "node"]


class VirtualGpu:
    """A device, its host's clock, and what it tells about both. Resolves the names of its own records."""

    def __init__(
        self,
        hardware: HardwareProfile,
        *,
        values: Values,
        capabilities: Capabilities,
        sink: Sink | None,
        watch: Sequence[Path],
        graph_trace: GraphTrace,
        hazards: bool,
    ) -> None:
        self.device = device()
        self.capabilities = capabilities
        self.graph_trace: GraphTrace = graph_trace
        checker = Checker(OrderedRuntime(hardware, sink=sink, watch=watch)) if hazards else None
        self.watcher: Watcher = checker or Nobody()
        self.runtime = checker.runtime if checker else Runtime(hardware, sink=sink, watch=watch)
        self.clock = VirtualClock(self.runtime)
        self.observer = HostObserver(self.runtime, hardware)
        self.executor: Executor = EagerExecutor() if values == "real" else SkippingExecutor()
        self.capture: Capture | None = None
        self.copies = WatchedCopies(self, checker) if checker else Copies(self)
        self.indexing = Indexing(self)
        self.handlers = WatchedHandlers(self, checker) if checker else Handlers(self)

    @property
    def sites(self) -> Sequence[Site]:
        return self.runtime.sites.resolved()

    @property
    def streams(self) -> dict[int, str]:
        return self.observer.streams

    def flush(self) -> None:
        """Let the device finish and deliver the rest of the timeline. For the end of a run: the clock stays."""
        self.runtime.flush()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Accesses that nothing orders, so far, if anybody watches for them."""
        return self.watcher.found(self.sites, self.streams)

    def set_item(self, tensor: DeviceTensor, index: Any, value: Any) -> None:
        self.indexing.set_item(tensor, index, value)


@contextmanager
def open_vgpu(
    hardware: HardwareProfile,
    *,
    values: Values = "real",
    capabilities: Capabilities | None = None,
    sink: Sink | None = None,
    watch: Sequence[Path] | None = None,
    graph_trace: GraphTrace = "graph",
    hazards: bool = False,
) -> Iterator[VirtualGpu]:
    """A virtual GPU of that hardware as ``torch.device("vgpu:0")``, without gradients, until the block ends.

    ``watch`` names the folders and files whose source lines are recorded, the scheduler's by default. A replay
    is one record per run of kernels, or with ``graph_trace="node"`` one per kernel. ``hazards`` keeps account of
    which access to memory is ordered before which. What is still open at the end is delivered to the sink. Raises
    RuntimeError beside an initialised CUDA, or inside another virtual GPU.
    """
    if CURRENT.get(None) is not None:
        raise RuntimeError("a virtual GPU is already open")
    register()
    gpu = VirtualGpu(
        hardware,
        values=values,
        capabilities=capabilities or hardware.capabilities,
        sink=sink,
        watch=[Path(folder) for folder in sched.__path__] if watch is None else watch,
        graph_trace=graph_trace,
        hazards=hazards,
    )
    token = CURRENT.set(gpu)
    try:
        with installed(gpu), torch.no_grad(), _without_view_chains(), gpu.watcher.listening():
            yield gpu
            gpu.flush()
    finally:
        CURRENT.reset(token)


@contextmanager
def _without_view_chains() -> Iterator[None]:
    """Views carry no history.

    Even without gradients torch keeps, for a view of a view of a view, how it came about: a list that is sliced once
    a step costs more with each step.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield
