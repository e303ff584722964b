"""The host's clock: integer nanoseconds since the machine was opened."""

from __future__ import annotations

import time

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
        before = self.now()
        wall = time.time_ns()
        return wall - (before + self.now()) // 2
