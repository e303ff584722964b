"""What held when: a value that changes at instants, looked up later."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from ...sched.observe import RANGES, Clock, StepInfo
from ..record.timeline import NO_SITE, Range

T = TypeVar("T")


class History(Generic[T]):
    """Piecewise constant. Changes come in order of time; of several at one instant the last holds."""

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
    """The innermost open range. One of unknown name belongs to the category of the one around it."""

    range: str
    step: int
    forward: bool

    def inside(self, name: str, step: int) -> LogContext:
        category = RANGES.get(name)
        return LogContext(name, step, category == "forward" if category else self.forward)


class CallRecord(NamedTuple):
    """A call into torch that is under way: its source line, its serial number and, for a wait for an event, the
    stream that the event was recorded on."""

    site: int
    call: int
    stream: int


NO_CONTEXT = LogContext("", -1, False)
NO_PLACE = CallRecord(NO_SITE, -1, -1)


@dataclass(slots=True)
class Log:
    """One pass. ``places`` stays empty where nobody asks for source lines."""

    ranges: list[Range] = field(default_factory=list)
    launched: list[StepInfo] = field(default_factory=list)
    settled: list[StepInfo] = field(default_factory=list)
    contexts: History[LogContext] = field(default_factory=lambda: History(NO_CONTEXT))
    places: History[CallRecord] = field(default_factory=lambda: History(NO_PLACE))


class LoggedRange:
    """A range of the scheduler while it is open."""

    __slots__ = ("_around", "_clock", "_context", "_log", "_size", "_start")

    def __init__(self, log: Log, clock: Clock, context: LogContext, size: int) -> None:
        self._log, self._clock, self._context, self._size = log, clock, context, size

    def __enter__(self) -> None:
        contexts = self._log.contexts
        self._around = contexts.current
        self._start = now = self._clock.now()
        contexts.change(now, self._context)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = self._clock.now()
        self._log.contexts.change(now, self._around)
        name, step, _ = self._context
        self._log.ranges.append(Range(name, step, self._size, self._start, now))
