"""Logs the source line of each call into torch, for the traced pass: Kineto's rows of CUDA have no Python lines.

Torch functions are logged by a function mode; methods of streams, events and graphs, which are no torch functions, are
replaced. Each logged call takes about two microseconds more on the host: this changes times of the traced pass, but no
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.overrides import TorchFunctionMode

from ...sched.observe import Clock
from ..vgpu.patching import Function, Target, replaced
from ..vgpu.sites import Sites
from .blocking_calls import EventStreams, sync_calls
from .log import CallRecord, Log

_ATTRIBUTES = frozenset({"__get__", "__set__"})  # .shape and other attributes, which do not reach the device


class CallSites:
    """Logs each outermost call. ``stream`` returns the number of a stream, or of the current one for None."""

    def __init__(self, log: Log, clock: Clock, sites: Sites, stream: Callable[[Any], int]) -> None:
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
            _CallSiteMode(self),
        ):
            yield

    def enter(self, stream: int = -1) -> CallRecord:
        """Log a call from the caller's caller. Returns the enclosing call, for ``leave``."""
        before = self._log.current
        self._count += 1
        self._log.change(self._clock.now(), CallRecord(self._sites.here(), self._count, stream))
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


class _CallSiteMode(TorchFunctionMode):
    def __init__(self, sites: CallSites) -> None:
        super().__init__()
        self._sites = sites

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        if getattr(func, "__name__", "") in _ATTRIBUTES:
            return func(*args, **(kwargs or {}))
        before = self._sites.enter()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._sites.leave(before)
