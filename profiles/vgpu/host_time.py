"""Host time as the scheduler's Python takes it on this machine, instead of what a profile declares for it.

The host's clock runs by the machine's own (``perf_counter_ns``) while the scheduler's code runs, and stands still
while the tool works::

    scheduler   plan ... x + y |               | ... settle ... | tokens(request) |          | ...
    clock       runs           | + launch, 4 us| runs           | stands          | stands   | runs
    tool                       | dispatch, sim |                |                 | metrics  |

Included: the scheduler's Python and numpy, its torch calls on host tensors, and of its torch calls on device tensors
what torch itself does on the way to the virtual GPU, up to ``__torch_dispatch__``. Neither a phase's a + b * n nor
``torch_call`` is charged beside that.

Excluded: the virtual GPU (``doors``): dispatch, values computed on the CPU, simulation, records, tags; observers,
metrics and sinks, the workload, the clock itself; passes of the garbage collector, for nearly all garbage is the
tool's; what the stopwatch costs, found by timing calls of nothing; and time in which the operating system had given
the processor to somebody else.

Declared by the profile still, for there is no driver here to be measured: launches, copy calls and what they take of
pageable memory, pinned memory, events, graph launches, the return from a sync.

What remains is this machine's: its speed, who else uses its caches, that the tool's own work has been through them,
so that the scheduler's code finds them colder than beside a real GPU, and that to drop a device tensor frees memory of
the host.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .doors import doors_off

if TYPE_CHECKING:
    from ..platform.hardware import HardwareProfile
    from .gpu import VirtualGpu
    from .runtime import Runtime

T = TypeVar("T")
Function = Callable[..., Any]

_ROUNDS, _CALLS = 20, 2000  # of nothing
# ns without a look at the thread's own time. What is shorter was not interrupted: an operating system gives slices
# of milliseconds, and to ask about each would cost more than most of them take.
_SUSPECT = 100_000


def without_own_time(hardware: HardwareProfile) -> HardwareProfile:
    """The profile without what is measured instead of declared: phases, and torch's share of a call."""
    nothing = hardware.host.torch_call.model_copy(update={"value": 0.0, "origin": "measured in the run"})
    host = hardware.host.model_copy(update={"torch_call": nothing})
    return hardware.model_copy(update={"host": host, "phases": {}})


@contextmanager
def measured(gpu: VirtualGpu) -> Iterator[HostStopwatch]:
    """A stopwatch for the host of that virtual GPU, for the duration of a block."""
    stopwatch = HostStopwatch(gpu.runtime)
    with doors_off(stopwatch.off):
        yield stopwatch


class HostStopwatch:
    """Moves the host's clock by real time, between ``resume`` and ``pause``."""

    __slots__ = ("_broken_into", "_looked", "_paused", "_resumed", "_runtime", "_toll", "is_running")

    def __init__(self, runtime: Runtime) -> None:
        self.is_running = False
        self._runtime = runtime
        self._paused = self._resumed = 0
        self._looked = (0, 0)  # real time and this thread's own, at one instant
        self._broken_into = False
        self._toll = 0  # ns that one call of nothing lets the clock run
        self._toll = min(self._time_nothing() for _ in range(_ROUNDS))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around code whose time counts."""
        gc.callbacks.append(self._collecting)
        self.resume()
        try:
            yield
        finally:
            self.pause()
            gc.callbacks.remove(self._collecting)

    def excluded(self, part: T) -> T:
        """``part`` with all its methods off the clock, and what they open too."""
        return cast(T, _Aside(part, self.off))

    def off(self, function: Function) -> Function:
        """``function`` with the clock standing still."""

        def standing(*args: Any, **kwargs: Any) -> Any:
            if not self.is_running:
                return function(*args, **kwargs)
            self.pause()
            try:
                return function(*args, **kwargs)
            finally:
                self.resume()

        return standing

    def pause(self) -> None:
        self._paused = now = time.perf_counter_ns()
        self.is_running = False
        elapsed = now - self._resumed - self._toll
        if elapsed > _SUSPECT:
            elapsed -= self._lost(now)
        if elapsed > 0:
            self._runtime.now += elapsed

    def resume(self) -> None:
        now = time.perf_counter_ns()
        if now - self._paused > _SUSPECT:
            own = time.thread_time_ns()
            now = time.perf_counter_ns()  # last: what is lost between the two is the tool's
            self._looked = now, own
        self.is_running = True
        self._resumed = now

    def _collecting(self, phase: str, info: object) -> None:  # noqa: ARG002
        """The garbage collector's call before and after a pass."""
        if phase == "start" and self.is_running:
            self.pause()
            self._broken_into = True
        elif phase == "stop" and self._broken_into:
            self._broken_into = False
            self.resume()

    def _lost(self, now: int) -> int:
        """How long this thread did not run since the last look. That was in the present interval, for every long one
        ends with a look."""
        (real, own), own_now = self._looked, time.thread_time_ns()
        self._looked = now, own_now
        return max(now - real - (own_now - own), 0)

    def _time_nothing(self) -> int:
        before, nothing = self._runtime.now, self.off(lambda: None)
        with self.running():
            for _ in range(_CALLS):
                nothing()
        charged = self._runtime.now - before
        self._runtime.now = before
        return charged // _CALLS


class _Aside:
    """Forwards every call to a part, off the clock. What the part has by a name may change from call to call."""

    def __init__(self, part: Any, off: Callable[[Function], Function]) -> None:
        self._part = part
        self._off = off

    def __getattr__(self, name: str) -> Function:
        forward = self._off(partial(self._call, name))
        setattr(self, name, forward)
        return forward

    def _call(self, name: str, *args: Any) -> Any:
        result = getattr(self._part, name)(*args)
        return _Opened(result, self._off) if isinstance(result, AbstractContextManager) else result


class _Opened:
    """A context manager that is entered and left off the clock."""

    __slots__ = ("_enter", "_exit")

    def __init__(self, manager: AbstractContextManager[object], off: Callable[[Function], Function]) -> None:
        self._enter = off(manager.__enter__)
        self._exit = off(manager.__exit__)

    def __enter__(self) -> None:
        self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit(kind, value, traceback)
