"""The virtual GPU: everything put together, for the duration of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ... import sched
from ...sched.config import Capabilities
from ..platform.hardware import HardwareProfile
from ..record.hazards import FoundHazard
from ..record.timeline import Sink, Site
from .equipment import Equipment, Values, adversarial, plain, watched
from .hazards.host import watched as host_watched
from .hazards.memory import VirtualMemory
from .indexing import Indexing
from .observer import VirtualClock
from .patches import installed
from .registration import register
from .tensor import CURRENT, DeviceTensor, device

if TYPE_CHECKING:
    from .engine import Simulation
    from .graph import GraphCapture
    from .watcher import Watcher

GraphTrace = Literal["graph", "node"]


class VirtualGpu:
    """A device, its host's clock, and what it tells about both. Resolves the names of its own records."""

    def __init__(
        self,
        equipment: Equipment,
        *,
        capabilities: Capabilities,
        graph_trace: GraphTrace,
    ) -> None:
        self.device = device()
        self.capabilities = capabilities
        self.graph_trace: GraphTrace = graph_trace
        self.runtime = equipment.runtime
        self.clock = VirtualClock(self.runtime)
        self.observer = equipment.observer
        self.watcher = equipment.watcher
        self.executor = equipment.executor
        self.capture: GraphCapture | None = None
        self.copies = equipment.copies(self)
        self.indexing = Indexing(self)
        self.handlers = equipment.handlers(self)

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
    def findings(self) -> tuple[FoundHazard, ...]:
        """Accesses that nothing orders, so far, if anybody watches for them."""
        return self.watcher.found(self.sites, {self.runtime.simulation.first - 1: "host", **self.streams})

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
    adversary: int | None = None,
    simulation: Simulation | None = None,
) -> Iterator[VirtualGpu]:
    """A virtual GPU of that hardware as ``torch.device("vgpu:0")``, without gradients, until the block ends.

    ``watch`` names the folders and files whose source lines are recorded, the scheduler's by default. A replay
    is one record per run of kernels, or with ``graph_trace="node"`` one per kernel. ``hazards`` keeps account of
    which access to memory is ordered before which; an ``adversary`` of that number does all work as late as the
    streams' order allows, and is not to be combined with it. ``simulation`` is given to one of several devices, around
    all of which their opener has ``patched`` torch. What is still open at the end is delivered to the sink.
    Raises RuntimeError beside an initialised CUDA, or inside another virtual GPU.
    """
    assert not (hazards and adversary is not None), "hazards follow values in program order"
    if CURRENT.get(None) is not None:
        raise RuntimeError("a virtual GPU is already open")
    register()
    folders = [Path(folder) for folder in sched.__path__] if watch is None else watch
    if adversary is not None:
        equipment = adversarial(hardware, values, sink, folders, seed=adversary, simulation=simulation)
    else:
        equipment = (watched if hazards else plain)(hardware, values, sink, folders, simulation)
    gpu = VirtualGpu(equipment, capabilities=capabilities or hardware.capabilities, graph_trace=graph_trace)
    token = CURRENT.set(gpu)
    try:
        around = patched(hazards=hazards) if simulation is None else nullcontext()
        with around, torch.no_grad(), _without_view_chains(), gpu.watcher.listening():
            yield gpu
            gpu.flush()
    finally:
        CURRENT.reset(token)


@contextmanager
def patched(*, hazards: bool) -> Iterator[None]:
    """Torch as virtual GPUs need it, with pinned memory; the host's accesses to that are heard of with ``hazards``."""
    with installed(), host_watched(_listener, VirtualMemory()) if hazards else nullcontext():
        yield


def _listener() -> Watcher | None:
    gpu = CURRENT.get(None)
    return None if gpu is None else gpu.watcher


@contextmanager
def _without_view_chains() -> Iterator[None]:
    """Views carry no history.

    Even without gradients torch keeps, for a view of a view of a view, how it came about: a list that is sliced once
    a step costs more with each step.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield
