"""Host time as the scheduler's Python takes it on this machine, instead of the costs that a profile declares.

The host's clock runs with the machine's (``perf_counter_ns``) while the scheduler's code runs, and is stopped while the
tool works::

    scheduler   plan ... x + y |               | ... settle ... | tokens(request) |          | ...
    clock       runs           | + launch, 4 us| runs           | stopped         | stopped  | runs
    tool                       | dispatch, sim |                |                 | metrics  |

Included: the scheduler's Python and numpy, its torch calls on host tensors, and of its torch calls on device tensors
what torch itself does before ``__torch_dispatch__``. Phases (a + b * n) and ``torch_call`` are not charged in addition.

Excluded: the virtual GPU from each of its entry points on, which is dispatch, values computed on the CPU, simulation,
records and tags; observers, metrics and sinks, the workload, the clock itself; passes of the garbage collector, since
nearly all garbage is the tool's; the overhead of the stopwatch, found by timing empty calls; and time in which the
operating system ran another thread although this one could run. Time that the scheduler sleeps or is blocked counts.

Declared by the profile, since there is no driver here to be measured: launches, copy calls and their reading of
pageable memory, pinned memory, events, graph launches, the return from a sync.

The remaining differences to a real host are this machine's: its speed, other users of its caches, that the tool's own
work evicts the scheduler's data from the caches, and that dropping a device tensor frees host memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

from ...sched.model import tags
from ..platform.hardware import HardwareProfile
from ..platform.machine import HostTime
from . import custom, fused, registration, streams
from .copies import CopyHandlers
from .device import VirtualGpu
from .direct import dispatched
from .graph import CUDAGraph, graph
from .patching import attributes_set
from .runtime import Runtime
from .tensor import DeviceTensor

T = TypeVar("T")
Function = Callable[..., Any]

_OVERHEAD_ROUNDS, _OVERHEAD_CALLS = 20, 2000  # of empty calls
# ns from which an interval is corrected for interruptions. Shorter ones had none, since operating systems assign slices
# of milliseconds, and a reading would take longer than most of them.
_LONG_INTERVAL = 100_000
# How often ``resume`` reads ``_interrupted`` at most. It reads again where the thread lost its processor right after a
# reading, since that wait belongs to no interval.
_READINGS = 3

# The ways in which the scheduler's code enters the virtual GPU: all methods of these classes, ...
_ENTRY_CLASSES = (
    streams.Stream,
    streams.Event,
    streams.StreamContext,
    CUDAGraph,
    graph,
    registration.DeviceModule,
)
# ... and these functions.
_ENTRY_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (DeviceTensor, "__torch_dispatch__"),
    (registration, "new"),
    (registration, "zeros"),
    (registration, "generated"),
    (CopyHandlers, "copy"),  # uploads arrive through a registered kernel, not through dispatch
    (Runtime, "copy"),  # so do reads of one number
    (fused, "run_as_one_kernel"),
    (custom, "launch_interpreted"),
    (torch.Tensor, "pin_memory"),
    (Runtime, "pin"),
    (tags, "kv_tags"),  # of ``values: none``; a real device does not execute it
)


def without_own_time(hardware: HardwareProfile) -> HardwareProfile:
    """The profile without the costs that are measured instead: phases, and torch's share of a call."""
    torch_call = hardware.host.torch_call.model_copy(update={"value": 0.0, "origin": "measured in the run"})
    host = hardware.host.model_copy(update={"torch_call": torch_call, "kernel_call": None})
    return hardware.model_copy(update={"host": host, "phases": {}})


@contextmanager
def measured(gpu: VirtualGpu) -> Iterator[HostStopwatch]:
    """A stopwatch for the host of that virtual GPU, which excludes the virtual GPU itself while the block runs."""
    stopwatch = HostStopwatch(gpu.runtime)
    # Torch's own part of a call counts, so every op is dispatched.
    with attributes_set([*wrapped_entries(stopwatch.off), *dispatched()]):
        yield stopwatch


def wrapped_entries(wrap: Callable[[Function], Function]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, wrapped function) for every way in which a program's code enters the virtual GPU."""
    entries = [*_ENTRY_FUNCTIONS]
    for owner in _ENTRY_CLASSES:
        entries += [(owner, name) for name, member in vars(owner).items() if isinstance(member, FunctionType)]
    for owner, name in entries:
        entry = vars(owner)[name]
        is_method = isinstance(entry, classmethod)
        yield owner, name, classmethod(wrap(entry.__func__)) if is_method else wrap(entry)


def _interrupted() -> int:
    """For how many ns this thread was ready to run and did not, since it began. Where the operating system does not
    count that (Linux does, in ``schedstat``: CPU time, waiting time, slices): for how long it did not run at all."""
    try:
        _, waited, slices = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        slices = "0"
    return int(waited) if int(slices) else time.perf_counter_ns() - time.thread_time_ns()


class HostStopwatch(HostTime):
    """Advances the host's clock by real time between ``resume`` and ``pause``."""

    def __init__(self, runtime: Runtime) -> None:
        self.is_running = False
        self._runtime = runtime
        self._paused = self._resumed = 0
        self._cpu = 0  # the thread's processor time when the clock resumed
        self._last_reading = 0  # of ``_interrupted``
        self._paused_by_gc = False
        self._overhead = 0  # ns that one empty call advances the clock
        self._overhead = min(self._measure_overhead() for _ in range(_OVERHEAD_ROUNDS))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds code whose time counts."""
        gc.callbacks.append(self._on_collection)
        self.resume()
        try:
            yield
        finally:
            self.pause()
            gc.callbacks.remove(self._on_collection)

    def excluded(self, part: T) -> T:
        """``part`` with all its methods excluded, and the context managers that they return."""
        return cast(T, _ExcludedCalls(part, self.off))

    def off(self, function: Function) -> Function:
        """``function`` with the clock stopped."""

        def excluded(*args: Any, **kwargs: Any) -> Any:
            if not self.is_running:
                return function(*args, **kwargs)
            self.pause()
            try:
                return function(*args, **kwargs)
            finally:
                self.resume()

        return excluded

    def pause(self) -> None:
        self._paused = now = time.perf_counter_ns()
        self.is_running = False
        elapsed = now - self._resumed - self._overhead
        if elapsed > _LONG_INTERVAL:
            off_processor = now - self._resumed - (time.thread_time_ns() - self._cpu)
            last, self._last_reading = self._last_reading, _interrupted()
            # Every long interval ends with a reading; what short ones before this one waited is in it, too.
            elapsed -= max(min(self._last_reading - last, off_processor), 0)
        if elapsed > 0:
            self._runtime.now += elapsed

    def resume(self) -> None:
        since = self._paused
        for _ in range(_READINGS):
            now = time.perf_counter_ns()
            if now - since <= _LONG_INTERVAL:
                break
            since, self._last_reading = now, _interrupted()
        self._cpu = time.thread_time_ns()
        self.is_running = True
        self._resumed = time.perf_counter_ns()  # last, since the time of the readings is the tool's

    def _on_collection(self, phase: str, info: object) -> None:  # noqa: ARG002
        """The garbage collector's call before and after a pass."""
        if phase == "start" and self.is_running:
            self.pause()
            self._paused_by_gc = True
        elif phase == "stop" and self._paused_by_gc:
            self._paused_by_gc = False
            self.resume()

    def _measure_overhead(self) -> int:
        before, empty = self._runtime.now, self.off(lambda: None)
        with self.running():
            for _ in range(_OVERHEAD_CALLS):
                empty()
        charged = self._runtime.now - before
        self._runtime.now = before
        return charged // _OVERHEAD_CALLS


class _ExcludedCalls:
    """Forwards calls to a part with the clock stopped. The part's attributes may change between calls."""

    def __init__(self, part: Any, off: Callable[[Function], Function]) -> None:
        self._part = part
        self._off = off

    def __getattr__(self, name: str) -> Function:
        forward = self._off(partial(self._call, name))
        setattr(self, name, forward)
        return forward

    def _call(self, name: str, *args: Any) -> Any:
        result = getattr(self._part, name)(*args)
        return _ExcludedContext(result, self._off) if isinstance(result, AbstractContextManager) else result


class _ExcludedContext:
    """A context manager that is entered and left with the clock stopped."""

    __slots__ = ("_enter", "_exit")

    def __init__(self, manager: AbstractContextManager[object], off: Callable[[Function], Function]) -> None:
        self._enter = off(manager.__enter__)
        self._exit = off(manager.__exit__)

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *raised: Any) -> None:
        self._exit(*raised)
