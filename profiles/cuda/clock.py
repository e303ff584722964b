"""The host's clock: integer nanoseconds from when the machine was opened."""

from __future__ import annotations

import time

SPIN = 100_000  # ns; a sleep wakes tens of microseconds late, so its end is spun


class WallClock:
    """``epoch`` is what to add to an instant of this clock to get nanoseconds since 1970, as CUPTI's records count."""

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
        before = self.now()
        wall = time.time_ns()
        return wall - (before + self.now()) // 2
