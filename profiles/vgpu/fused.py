"""A function of torch's operators that counts as one kernel, as the fused kernel does that it stands for.

Values, graphs, ``values: none`` and accesses are those of the function's operators; only their launches become one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..record.timeline import OpKind
from .device import CURRENT
from .runtime import GraphCaptureError, Recorded, TimedByValues
from .tensor import DeviceTensor


class FusedLaunches:
    """Receives the launches of a fused kernel's operators. ``work`` is their time in ns without the fixed part of each:
    an upper bound, since intermediate results count as traffic of memory."""

    def __init__(self, fixed: int) -> None:
        self.count = self.work = self.host_size = 0
        self._fixed = fixed

    def variable(self, kernel: TimedByValues, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ARG002
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
    gpu = CURRENT.get()
    runtime, results = gpu.runtime, list[DeviceTensor]()
    capture, now = runtime.capture, runtime.now
    runtime.capture = launches = FusedLaunches(runtime.costs.fixed)
    try:
        with gpu.watcher.fused(name, results):
            out = function(*args, **kwargs)
            results += device_tensors(out)
    except GraphCaptureError as error:
        raise RuntimeError(f"{name}: the function that stands for this kernel copies or waits") from error
    finally:
        runtime.capture, runtime.now = capture, now
    if launches.count:
        runtime.kernel(name, runtime.costs.fixed + launches.work, host_size=launches.host_size)
    return out


def device_tensors(value: Any) -> Iterator[DeviceTensor]:
    """The device tensors in a value and in the lists, tuples and mappings in it."""
    if type(value) is DeviceTensor:
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from device_tensors(part)
    elif isinstance(value, Mapping):
        yield from device_tensors(list(value.values()))
