"""Which line called torch, for the traced pass: Kineto has no Python lines without the host's own activities.

Every call from Python into torch is logged with its source line, by a function mode; methods of streams and events,
which are no torch functions, by replacing them. It costs about two microseconds per call and makes the traced
pass slower on the host, never on the device: counts are as they were, times are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.overrides import TorchFunctionMode

from ...sched.observe import Clock
from ..vgpu.sites import Sites
from .log import CallRecord, Log
from .patching import Function, Target, replaced

_ATTRIBUTES = frozenset({"__get__", "__set__"})  # .shape and its like never reach the device


class CallSites:
    """Logs each outermost call's place. ``stream`` numbers a stream, the current one for None."""

    def __init__(self, log: Log, clock: Clock, sites: Sites, stream: Callable[[Any], int]) -> None:
        self._places = log.places
        self._clock = clock
        self._sites = sites
        self._stream = stream
        self._calls = 0
        self._recorded: dict[int, int] = {}  # stream by id of the event that was recorded on it last

    @contextmanager
    def installed(self, device_module: Any) -> Iterator[None]:
        """On this thread, for the duration of the block. ``device_module`` is ``torch.cuda`` or its like."""
        event = device_module.Event
        others = (
            Target(event, "wait", "cudaStreamWaitEvent"),
            Target(device_module.Stream, "synchronize", "cudaStreamSynchronize"),
            Target(device_module, "synchronize", "cudaDeviceSynchronize"),
            Target(device_module.CUDAGraph, "replay", "cudaGraphLaunch"),
        )
        with (
            replaced(others, self._logged),
            replaced([Target(event, "record", "cudaEventRecord")], self._recording),
            replaced([Target(event, "synchronize", "cudaEventSynchronize")], self._awaiting),
            _CallSiteMode(self),
        ):
            yield

    def enter(self, stream: int = -1) -> CallRecord:
        """Log the call of the caller's caller; returns what to go back to."""
        before = self._places.current
        self._calls += 1
        self._places.change(self._clock.now(), CallRecord(self._sites.here(), self._calls, stream))
        return before

    def leave(self, before: CallRecord) -> None:
        self._places.change(self._clock.now(), before)

    def _logged(self, target: Target, function: Function) -> Function:  # noqa: ARG002
        @wraps(function)
        def logged(*args: Any, **kwargs: Any) -> Any:
            before = self.enter()
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(before)

        return logged

    def _recording(self, target: Target, function: Function) -> Function:
        record = self._logged(target, function)

        @wraps(function)
        def recording(event: Any, stream: Any = None) -> Any:
            self._recorded[id(event)] = self._stream(stream)
            return record(event) if stream is None else record(event, stream)

        return recording

    def _awaiting(self, target: Target, function: Function) -> Function:  # noqa: ARG002
        @wraps(function)
        def awaiting(event: Any) -> Any:
            before = self.enter(self._recorded.get(id(event), -1))
            try:
                return function(event)
            finally:
                self.leave(before)

        return awaiting


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
