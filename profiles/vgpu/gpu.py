"""Opens a virtual GPU and puts it together: plain, with the hazard checker, or with an adversary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from ... import sched
from ..platform.hardware import HardwareProfile
from ..platform.machine import Watcher
from ..record.timeline import Sink
from .adversary.executor import AdversarialExecutor, DeferredRuntime, poison_explained
from .adversary.order import DeferredOrder, strategy
from .adversary.reuse import BlockReuse
from .copies import CopyHandlers
from .counterfactual import Counterfactual, CounterfactualRuntime
from .device import CURRENT, GraphTrace, VirtualGpu
from .engine import Simulation
from .executor import Executor, SkippingExecutor
from .handlers import OpHandlers
from .hazards.checker import HazardChecker
from .hazards.ops import checked, host_accesses
from .hazards.probes import ProbedClocks
from .registration import register
from .runtime import Runtime
from .sites import Sites
from .torch_patches import installed
from .watched import VirtualMemory, WatchedCopies, WatchedRuntime

Values = Literal["real", "none"]


@contextmanager
def open_vgpu(
    hardware: HardwareProfile,
    *,
    values: Values = "real",
    sink: Sink | None = None,
    watch: Sequence[Path] | None = None,
    graph_trace: GraphTrace = "graph",
    hazards: bool = False,
    adversary: int | None = None,
    simulation: Simulation | None = None,
    gradients: bool = False,
    counterfactual: Counterfactual | None = None,
) -> Iterator[VirtualGpu]:
    """A virtual GPU of that hardware as ``torch.device("vgpu:0")`` until the block ends, without ``gradients`` unless
    they are asked for, since torch's records of them cost time.

    ``watch`` names the folders and files whose source lines are recorded, by default the scheduler's. A replay is one
    record per run of kernels, or with ``graph_trace="node"`` one per kernel. ``hazards`` checks that accesses to memory
    are ordered; an ``adversary`` of that number does all work as late as the order of the streams allows. The two
    exclude each other. A ``counterfactual`` changes the times of one source line, and is of a device with neither.
    ``simulation`` is given to one of several devices, whose opener has ``patched`` torch around all
    of them. At the end the rest of the timeline is delivered to the sink. Raises RuntimeError if CUDA is initialised or
    another virtual GPU is open.
    """
    assert not (hazards and adversary is not None), "hazards follow values in program order"
    assert counterfactual is None or not (hazards or adversary is not None)
    if CURRENT.get(None) is not None:
        raise RuntimeError("a virtual GPU is already open")
    register()
    folders = [Path(folder) for folder in sched.__path__] if watch is None else watch
    inputs = hardware, sink, Sites(folders), simulation
    executor = Executor() if values == "real" else SkippingExecutor()
    if adversary is not None:
        gpu = _adversarial(DeferredRuntime(*inputs), executor, adversary)
    elif hazards:
        gpu = _watched(WatchedRuntime(*inputs), executor, Sites(folders))
    else:
        runtime = CounterfactualRuntime(counterfactual, *inputs) if counterfactual else Runtime(*inputs)
        gpu = VirtualGpu(runtime, executor, Watcher(), lambda gpu: OpHandlers(gpu, CopyHandlers(gpu)))
    gpu.graph_trace = graph_trace
    token = CURRENT.set(gpu)
    try:
        patches = patched(hazards=hazards, shortened=not gradients) if simulation is None else nullcontext()
        history = nullcontext() if gradients else _without_gradients()
        explained = nullcontext() if adversary is None else poison_explained()
        with patches, history, gpu.watcher.listening(), explained:
            yield gpu
            gpu.flush()
    finally:
        CURRENT.reset(token)


def _watched(runtime: WatchedRuntime, executor: Executor, places: Sites) -> VirtualGpu:
    """``places`` are the source lines that order accesses."""
    runtime.clocks = ProbedClocks(runtime.simulation.first, places)
    checker = HazardChecker(runtime, VirtualMemory())

    def handlers(gpu: VirtualGpu) -> OpHandlers:
        return OpHandlers(gpu, WatchedCopies(gpu, checker), partial(checked, checker))

    return VirtualGpu(runtime, executor, checker, handlers)


def _adversarial(runtime: DeferredRuntime, immediate: Executor, seed: int) -> VirtualGpu:
    """``seed`` numbers the strategy. Times mean nothing, since a kernel's time may follow from values that are computed
    after its launch."""
    executor, reuse = AdversarialExecutor(immediate, runtime), BlockReuse(runtime)

    def handlers(gpu: VirtualGpu) -> OpHandlers:
        return OpHandlers(gpu, CopyHandlers(gpu), lambda _, handler: reuse.following(handler))

    gpu = VirtualGpu(runtime, executor, reuse, handlers)
    runtime.order = DeferredOrder(strategy(seed, gpu.streams))
    return gpu


@contextmanager
def patched(*, hazards: bool, shortened: bool = True) -> Iterator[None]:
    """Torch with the pinned memory of virtual GPUs. With ``hazards`` the host's accesses to it are reported, too;
    ``shortened``: without torch's dispatcher where it records nothing."""
    with (
        installed(shortened=shortened),
        host_accesses(_watcher, VirtualMemory()) if hazards else nullcontext(),
    ):
        yield


def _watcher() -> Watcher | None:
    gpu = CURRENT.get(None)
    return None if gpu is None else gpu.watcher


@contextmanager
def _without_gradients() -> Iterator[None]:
    """No gradients, and views without a history.

    Even without gradients torch keeps, for a view of a view, how each was made: slicing a list once per step would cost
    more with every step.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(keys):
        yield
