"""Writes what the scheduler reports to its observer into the log of the current window."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ...sched.observe import Clock, Observer, StepInfo
from .log import Log, LogContext, LoggedRange
from .step_spans import StepSpans
from .streams import StreamTable

# Ranges that end a step's forward. Of several, the latest counts.
LAST_RANGES = frozenset(("publish", "draft"))


class CudaObserver(Observer):
    """Logs the ranges, steps and streams of the current pass, and its forward spans if the pass is timed."""

    def __init__(self, clock: Clock, streams: StreamTable, handle: Callable[[Any], int]) -> None:
        self.log = Log()
        self.spans: StepSpans | None = None
        self._clock = clock
        self._streams = streams
        self._handle = handle

    def begin(self, spans: StepSpans | None) -> Log:
        self.log, self.spans = Log(), spans
        return self.log

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        context = self.log.contexts.current.inside(name, step)
        if self.spans is None or not context.forward:
            return LoggedRange(self.log, self._clock, context, size)
        return _SpannedRange(self.log, self._clock, context, size, self.spans)

    def stream(self, name: str, stream: Any) -> None:
        self._streams.announce(name, self._handle(stream))

    def launched(self, info: StepInfo) -> None:
        self.log.launched.append(info)

    def settled(self, info: StepInfo) -> None:
        self.log.settled.append(info)
        if self.spans is not None:
            self.spans.settled(info.step)


class _SpannedRange(LoggedRange):
    """A forward range of a timed pass: a step's first one begins its span, and one of ``LAST_RANGES`` ends it."""

    __slots__ = ("_spans",)

    def __init__(self, log: Log, clock: Clock, context: LogContext, size: int, spans: StepSpans) -> None:
        super().__init__(log, clock, context, size)
        self._spans = spans

    def __enter__(self) -> None:
        super().__enter__()
        self._spans.open(self._context.step)

    def __exit__(self, *raised: Any) -> None:
        if self._context.range in LAST_RANGES:
            self._spans.close(self._context.step)
        super().__exit__(*raised)
