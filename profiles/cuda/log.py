"""The run's own log: ranges, steps, and which line was calling torch, all on the host's clock.

Records of the device are joined with it by time: a call belongs to what was open on the scheduler's thread when
it was made. That needs no annotation in the trace and works for every source of records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from ...sched.observe import RANGES, Clock, StepInfo
from ..record.timeline import NO_SITE, Range
from .history import History


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
