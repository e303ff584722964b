"""The Python calls of both passes: in the timed one, those in which the host may wait for the device, with their times;
in the traced one the source line of each call into torch, since Kineto's rows of CUDA have no Python lines.

A sync that torch makes inside an operator (a boolean mask, ``unique``) is not timed; the traced pass counts it. There,
torch functions are logged by a function mode; methods of streams, events and graphs, which are no torch functions, are
replaced. Each logged call takes about two microseconds more on the host: this changes times of the traced pass, but no
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ...sched.observe import Clock
from ..record.timeline import NO_SITE, Call, CallKind
from ..vgpu.patching import Function, Target, replaced
from ..vgpu.sites import Sites
from .log import CallRecord, Log

MEMCPY: Final = "cudaMemcpyAsync"
# ns; a shorter call did not wait. Estimates: no GPU has measured them.
NO_WAIT_BELOW: Final[dict[CallKind, int]] = {"sync": 5_000, "copy": 20_000}

_READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")
_READERS = tuple(Target(torch.Tensor, name, MEMCPY) for name in _READS)
_MOVERS = (Target(torch.Tensor, "to", MEMCPY), Target(torch, "tensor", MEMCPY))


def sync_calls(device_module: Any) -> tuple[Target, ...]:
    """The calls whose purpose is to wait."""
    return (
        Target(device_module.Event, "synchronize", "cudaEventSynchronize"),
        Target(device_module.Stream, "synchronize", "cudaStreamSynchronize"),
        Target(device_module, "synchronize", "cudaDeviceSynchronize"),
    )


class EventStreams:
    """The stream that each event was recorded on last. ``number`` returns the number of a stream, or of the current one
    for None."""

    def __init__(self, number: Callable[[Any], int]) -> None:
        self._number = number
        self._last: dict[int, int] = {}  # by id of the event

    def of(self, event: object) -> int | None:
        return self._last.get(id(event))

    def recording(self, target: Target, function: Function) -> Function:  # noqa: ARG002
        """``function``, which is an event's ``record``, with the stream noted."""

        @wraps(function)
        def recording(event: Any, stream: Any = None) -> Any:
            self._last[id(event)] = self._number(stream)
            return function(event) if stream is None else function(event, stream)

        return recording


@dataclass(slots=True)
class BlockingCalls:
    """The possibly waiting calls of one pass. ``stream`` returns the number of the current stream."""

    clock: Clock
    log: Log
    device_type: str
    stream: Callable[[], int]
    calls: list[Call] = field(default_factory=list)

    def begin(self, log: Log) -> Log:
        """Drop the calls so far, and take contexts from ``log`` from now on."""
        self.log, self.calls = log, []
        return log

    @contextmanager
    def installed(self, device_module: Any) -> Iterator[None]:
        """``device_module`` is ``torch.cuda`` or a module like it."""
        on_device = self._on_device
        with (
            replaced(sync_calls(device_module), self._timed("sync", lambda *_: True)),
            replaced(_READERS, self._timed("copy", lambda given, _: on_device(given))),
            replaced(_MOVERS, self._timed("copy", lambda given, out: on_device(given) != on_device(out))),
        ):
            yield

    def _timed(
        self, kind: CallKind, may_wait: Callable[[Any, Any], bool]
    ) -> Callable[[Target, Function], Function]:
        """Time the calls of which ``may_wait`` holds, by their first argument and their result."""

        def wrap(target: Target, function: Function) -> Function:
            @wraps(function)
            def timed(*args: Any, **kwargs: Any) -> Any:
                start = self.clock.now()
                result = function(*args, **kwargs)
                if may_wait(args[0] if args else None, result):
                    end = self.clock.now()
                    context = self.log.contexts.current
                    self.calls.append(
                        Call(
                            kind=kind,
                            name=target.call,
                            start=start,
                            end=end,
                            waited=end - start if end - start >= NO_WAIT_BELOW[kind] else 0,
                            stream=self.stream(),
                            range=context.range,
                            step=context.step,
                            site=NO_SITE,
                        )
                    )
                return result

            return timed

        return wrap

    def _on_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self.device_type


_ATTRIBUTES = frozenset({"__get__", "__set__"})  # .shape and other attributes, which do not reach the device


class CallSites(TorchFunctionMode):
    """Logs each outermost call. ``stream`` returns the number of a stream, or of the current one for None."""

    def __init__(self, log: Log, clock: Clock, sites: Sites, stream: Callable[[Any], int]) -> None:
        super().__init__()
        self._log = log.calls
        self._clock = clock
        self._sites = sites
        self._events = EventStreams(stream)
        self._count = 0

    @contextmanager
    def installed(self, device_module: Any) -> Iterator[None]:
        """Log the calls of this thread in this block. ``device_module`` is ``torch.cuda`` or a module like it."""
        event = device_module.Event
        targets = (
            Target(event, "wait", "cudaStreamWaitEvent"),
            *sync_calls(device_module),
            Target(device_module.CUDAGraph, "replay", "cudaGraphLaunch"),
        )
        with (
            replaced(targets, self._logged),
            replaced([Target(event, "record", "cudaEventRecord")], self._recording),
            self,
        ):
            yield

    def enter(self, stream: int = -1) -> CallRecord:
        """Log a call from the caller's caller. Returns the enclosing call, for ``leave``."""
        before = self._log.current
        self._count += 1
        self._log.change(self._clock.now(), CallRecord(self._sites.here(2), self._count, stream))
        return before

    def leave(self, before: CallRecord) -> None:
        self._log.change(self._clock.now(), before)

    def _logged(self, target: Target, function: Function) -> Function:
        awaits = target.call == "cudaEventSynchronize"

        @wraps(function)
        def logged(*args: Any, **kwargs: Any) -> Any:
            stream = self._events.of(args[0]) if awaits else None
            before = self.enter(-1 if stream is None else stream)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(before)

        return logged

    def _recording(self, target: Target, function: Function) -> Function:
        return self._events.recording(target, self._logged(target, function))

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        if getattr(func, "__name__", "") in _ATTRIBUTES:
            return func(*args, **(kwargs or {}))
        before = self.enter()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.leave(before)
