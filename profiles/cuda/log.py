"""The log of one pass: ranges, steps, and the source line of each call into torch, on the host's clock.

Records of the device are joined with the log by time: a call belongs to the range and the line that were open on the
scheduler's thread when it was made. This needs no annotations in the trace, and works for every source of records.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from ...sched.observe import RANGES, Clock, StepInfo
from ..record.timeline import NO_SITE, Range

T = TypeVar("T")


class History(Generic[T]):
    """A piecewise constant value. Changes are given in order of time; of several at one instant the last one counts."""

    def __init__(self, first: T) -> None:
        self.current = first
        self._first = first
        self._instants: list[int] = []
        self._values: list[T] = []

    def change(self, at: int, value: T) -> None:
        self.current = value
        self._instants.append(at)
        self._values.append(value)

    def at(self, instant: int) -> T:
        index = bisect_right(self._instants, instant)
        return self._values[index - 1] if index else self._first


class LogContext(NamedTuple):
    """The innermost open range. A range of unknown name has the category of the enclosing range."""

    range: str
    step: int
    forward: bool

    def inside(self, name: str, step: int) -> LogContext:
        category = RANGES.get(name)
        return LogContext(name, step, category == "forward" if category else self.forward)


class CallRecord(NamedTuple):
    """A call into torch in progress: its source line, its serial number and, if it waits for an event, the stream that
    the event was recorded on."""

    site: int
    call: int
    stream: int


NO_CONTEXT = LogContext("", -1, False)
NO_CALL = CallRecord(NO_SITE, -1, -1)


@dataclass(slots=True)
class Log:
    """``calls`` stays empty where source lines are not recorded."""

    ranges: list[Range] = field(default_factory=list)
    launched: list[StepInfo] = field(default_factory=list)
    settled: list[StepInfo] = field(default_factory=list)
    contexts: History[LogContext] = field(default_factory=lambda: History(NO_CONTEXT))
    calls: History[CallRecord] = field(default_factory=lambda: History(NO_CALL))


class LoggedRange:
    """A range of the scheduler, logged when it closes."""

    __slots__ = ("_clock", "_context", "_enclosing", "_log", "_size", "_start")

    def __init__(self, log: Log, clock: Clock, context: LogContext, size: int) -> None:
        self._log, self._clock, self._context, self._size = log, clock, context, size

    def __enter__(self) -> None:
        contexts = self._log.contexts
        self._enclosing = contexts.current
        self._start = now = self._clock.now()
        contexts.change(now, self._context)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = self._clock.now()
        self._log.contexts.change(now, self._enclosing)
        name, step, _ = self._context
        self._log.ranges.append(Range(name, step, self._size, self._start, now))
