"""Idle time of the device of a pipeline stage, by the microbatch that it waited for."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ..record.timeline import Window

TURN = "turn"  # a range of the pipelined loop, whose size is the place of the microbatch
OUTSIDE_TURNS = -1


class StageTime(NamedTuple):
    """Times in ns. ``idle`` is by the place of the microbatch whose kernel ended it, or OUTSIDE_TURNS."""

    first: int
    last: int
    busy: int
    idle: dict[int, int]


class BubbleSink:
    """Takes windows in time order::

    kernels   |-- mb 0 --|     |-- mb 1 --|-- mb 1 --|  |-- mb 0 --|
    idle                  mb 1                        mb 0
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._end = 0
        self._busy = 0
        self._idle: Counter[int] = Counter()
        self._places: dict[int, int] = {}

    def feed(self, window: Window) -> None:
        self._places.update((entry.step, entry.size) for entry in window.ranges if entry.name == TURN)
        for op in sorted((op for op in window.ops if op.kind == "kernel"), key=lambda op: op.start):
            if self._first is None:
                self._first = self._end = op.start
            if op.start > self._end:
                self._idle[self._places.get(op.step, OUTSIDE_TURNS)] += op.start - self._end
            self._busy += max(0, op.end - max(op.start, self._end))
            self._end = max(self._end, op.end)

    def found(self) -> StageTime | None:
        """None where no kernel ran."""
        if self._first is None:
            return None
        return StageTime(self._first, self._end, self._busy, dict(self._idle))


def bubble(stages: list[StageTime]) -> float:
    """Percent: 1 - sum of busy times / (stages x window), where the window spans all stages."""
    window = max(stage.last for stage in stages) - min(stage.first for stage in stages)
    return 100 * (1 - sum(stage.busy for stage in stages) / (len(stages) * window)) if window else 0.0
