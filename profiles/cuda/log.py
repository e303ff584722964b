"""The log of one pass: ranges, steps, streams, and the source line of each call into torch, on the host's clock.

Records of the device are joined with the log by time: a call belongs to the range and the line that were open on the
scheduler's thread when it was made. This needs no annotations in the trace, and works for every source of records.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ...sched.observe import StepInfo
from ..record.timeline import NO_SITE, Range
from ..vgpu.ledger import NO_CONTEXT, LedgerContext

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


class CallRecord(NamedTuple):
    """A call into torch in progress: its source line, its serial number and, if it waits for an event, the stream that
    the event was recorded on."""

    site: int
    call: int
    stream: int


NO_CALL = CallRecord(NO_SITE, -1, -1)


@dataclass(slots=True)
class Log:
    """``calls`` stays empty where source lines are not recorded."""

    ranges: list[Range] = field(default_factory=list)
    launched: list[StepInfo] = field(default_factory=list)
    settled: list[StepInfo] = field(default_factory=list)
    contexts: History[LedgerContext] = field(default_factory=lambda: History(NO_CONTEXT))
    calls: History[CallRecord] = field(default_factory=lambda: History(NO_CALL))


SPIN = 100_000  # ns; time.sleep returns tens of microseconds late, so the end of a wait is spun


class WallClock:
    """``epoch`` plus an instant of this clock is in ns since 1970, as in CUPTI's records."""

    def __init__(self) -> None:
        self._origin = time.perf_counter_ns()

    def now(self) -> int:
        return time.perf_counter_ns() - self._origin

    def sleep_until(self, at: int) -> None:
        rest = at - self.now() - SPIN
        if rest > 0:
            time.sleep(rest / 1e9)
        while self.now() < at:
            pass

    @property
    def epoch(self) -> int:
        # Of several readings the quickest counts: in another, the thread may have been interrupted between the clocks.
        readings = [(self.now(), time.time_ns(), self.now()) for _ in range(5)]
        before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
        return wall - (before + after) // 2


DEFAULT = "default"
_UNNAMED = 1000  # first number of the streams that are known from CUPTI only


class StreamTable:
    """The small number and the name of each stream, as records have them. The last name given to a stream counts."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._by_handle: dict[int, int] = {}
        self._by_cupti: dict[int, int] = {}
        self.announce(DEFAULT, 0)

    def announce(self, name: str, handle: int) -> None:
        """Name the stream of this CUDA handle."""
        self.names[self.by_handle(handle)] = name

    def by_handle(self, handle: int) -> int:
        return self._by_handle.setdefault(handle, len(self._by_handle))

    def handles(self) -> list[int]:
        """The handles of all named streams; the default stream's is 0."""
        return [handle for handle, number in self._by_handle.items() if number in self.names]

    def identify(self, cupti: int, handle: int) -> None:
        """Set CUPTI's number of the stream of this handle."""
        self._by_cupti[cupti] = self.by_handle(handle)

    def by_cupti(self, cupti: int) -> int:
        """A stream that was never named gets its name from CUPTI's number."""
        number = self._by_cupti.setdefault(cupti, _UNNAMED + cupti)
        self.names.setdefault(number, f"stream {cupti}")
        return number
