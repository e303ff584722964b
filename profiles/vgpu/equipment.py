"""What a virtual GPU is made of: plain, with somebody who watches every access, or with an adversary at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from .adversary.executor import AdversarialExecutor
from .adversary.order import DeferredOrder
from .adversary.reuse import Reuse, ReusingHandlers
from .adversary.runtime import DeferredRuntime
from .adversary.strategies import temper
from .copies import CopyHandlers
from .executor import EagerExecutor, Executor
from .handlers import Handlers
from .hazards.checker import Checker
from .hazards.copies import WatchedCopies
from .hazards.memory import VirtualMemory
from .hazards.ops import WatchedHandlers
from .hazards.runtime import OrderedRuntime
from .observer import HostObserver
from .runtime import Runtime
from .skipping import SkippingExecutor
from .watcher import Watcher

if TYPE_CHECKING:
    from ..platform.hardware import HardwareProfile
    from ..record.timeline import Sink
    from .engine import Simulation
    from .gpu import VirtualGpu

Values = Literal["real", "none"]


class Equipment(NamedTuple):
    runtime: Runtime
    observer: HostObserver
    executor: Executor
    watcher: Watcher
    copies: Callable[[VirtualGpu], CopyHandlers]
    handlers: Callable[[VirtualGpu], Handlers]


def plain(
    hardware: HardwareProfile,
    values: Values,
    sink: Sink | None,
    watch: Sequence[Path],
    simulation: Simulation | None,
) -> Equipment:
    runtime = Runtime(hardware, sink=sink, watch=watch, simulation=simulation)
    observer = HostObserver(runtime, hardware)
    return Equipment(runtime, observer, _immediate(values), Watcher(), CopyHandlers, Handlers)


def watched(
    hardware: HardwareProfile,
    values: Values,
    sink: Sink | None,
    watch: Sequence[Path],
    simulation: Simulation | None,
) -> Equipment:
    """Looks for accesses that nothing orders."""
    runtime = OrderedRuntime(hardware, sink=sink, watch=watch, simulation=simulation)
    checker = Checker(runtime, VirtualMemory())
    return Equipment(
        runtime,
        HostObserver(runtime, hardware),
        _immediate(values),
        checker,
        lambda gpu: WatchedCopies(gpu, checker),
        lambda gpu: WatchedHandlers(gpu, checker),
    )


def adversarial(
    hardware: HardwareProfile,
    values: Values,
    sink: Sink | None,
    watch: Sequence[Path],
    *,
    seed: int,
    simulation: Simulation | None,
) -> Equipment:
    """Works as late as allowed; ``seed`` numbers the strategy. Times mean nothing then: a kernel's may follow from
    values that are not there when it is launched."""
    runtime = DeferredRuntime(hardware, sink=sink, watch=watch, simulation=simulation)
    observer = HostObserver(runtime, hardware)
    runtime.order = DeferredOrder(temper(seed, observer.streams))
    reuse = Reuse(runtime)
    executor = AdversarialExecutor(_immediate(values), runtime)
    return Equipment(
        runtime, observer, executor, reuse, CopyHandlers, lambda gpu: ReusingHandlers(gpu, reuse)
    )


def _immediate(values: Values) -> Executor:
    return EagerExecutor() if values == "real" else SkippingExecutor()
