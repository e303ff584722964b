"""The period of the loop, and the clock that announces sleep."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ...sched.observe import Clock, Observer, StepInfo
from .distribution import Distribution
from .steps import PARTS
from .waiting import SLEEP

NO_STEP = -1


class SleepAnnouncingClock:
    """A clock that announces its sleeps as a range, so that a timeline can distinguish no work from late work."""

    def __init__(self, clock: Clock, observer: Observer) -> None:
        self._clock = clock
        self._observer = observer

    def now(self) -> int:
        return self._clock.now()

    def sleep_until(self, at: int) -> None:
        with self._observer.range(SLEEP, NO_STEP, 0):
            self._clock.sleep_until(at)


class StepPeriods(Observer):
    """Times from each launch to the next, ns, without periods in which the scheduler slept. Under overlap a period
    belongs to no single step: it contains the settling of one step and the preparing of another."""

    def __init__(self, clock: Clock) -> None:
        self.periods = Distribution()
        self._clock = clock
        self._last: int | None = None

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        if name == SLEEP:
            self._last = None
        return super().range(name, step, size)

    def launched(self, info: StepInfo) -> None:
        if info.kind in PARTS:
            return
        now = self._clock.now()
        if self._last is not None:
            self.periods.add(now - self._last)
        self._last = now
