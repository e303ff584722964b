"""A function of torch's operators that counts as one kernel, as the fused kernel does that it stands for.

Values, graphs, ``values: none`` and accesses are those of the function's operators; only their launches become one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ..record.timeline import OpKind
from .device import CURRENT
from .engine import StreamQueue
from .executor import tensors_in
from .runtime import GraphCaptureError, Recorded, TimedByValues
from .tensor import DeviceTensor

T = TypeVar("T")


class FusedLaunches:
    """Receives the launches of a fused kernel's operators. ``work`` is their time in ns without the fixed part of each:
    an upper bound, since intermediate results count as traffic of memory."""

    def __init__(self, fixed: int) -> None:
        self.count = self.work = self.host_size = 0
        self._fixed = fixed

    def variable(self, kernel: TimedByValues, args: Sequence[Any]) -> None:  # noqa: ARG002
        self.node("kernel", kernel.name, self._fixed)

    def node(self, kind: OpKind, name: str, duration: int, *, size: int = 0, host_size: int = 0) -> None:  # noqa: ARG002
        self.count += 1
        self.work += max(duration - self._fixed, 0)
        self.host_size += host_size

    def mark(self, recorded: Recorded) -> None:  # noqa: ARG002
        raise GraphCaptureError("a kernel records no event")


def run_as_one_kernel(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function; everything that it launches on the open virtual GPU counts as one kernel called ``name``.

    Raises RuntimeError if the function copies between host and device, which no kernel does.
    """
    runtime, results = CURRENT.get().runtime, list[DeviceTensor]()
    with _collected(name, results) as launches:
        out = function(*args, **kwargs)
        results += (tensor for tensor in tensors_in(out) if type(tensor) is DeviceTensor)
    if launches.count:
        runtime.kernel(name, runtime.costs.fixed + launches.work, host_size=launches.host_size)
    return out


def run_on_queue(name: str, queue: StreamQueue, function: Callable[[], T]) -> T:
    """Call the function, whose accesses are those of one operation ``name`` of the queue. Nothing is launched: another
    device, such as a network adapter, has access to the memory. Results are the host's.

    Raises RuntimeError if the function copies between host and device."""
    runtime = CURRENT.get().runtime
    before, runtime.stream = runtime.stream, queue
    try:
        with _collected(name, []):
            return function()
    finally:
        runtime.stream = before


@contextmanager
def _collected(name: str, results: Sequence[DeviceTensor]) -> Iterator[FusedLaunches]:
    """What is launched in the block is collected, and takes no time of the host."""
    gpu = CURRENT.get()
    runtime = gpu.runtime
    capture, now = runtime.capture, runtime.now
    runtime.capture = launches = FusedLaunches(runtime.costs.fixed)
    try:
        with gpu.watcher.fused(name, results):
            yield launches
    except GraphCaptureError as error:
        raise RuntimeError(f"{name}: the function that stands for this kernel copies or waits") from error
    finally:
        runtime.capture, runtime.now = capture, now
