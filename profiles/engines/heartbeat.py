"""Says that a run in an engine's process advances, so that one that does not can be ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ...sched.observe import Clock, Observer, StepInfo

_EVERY_S: Final = 1.0


class Heartbeat(Observer):
    """An observer that calls ``beat`` at a step's end, at most once per second."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._due = 0.0

    def settled(self, info: StepInfo) -> None:  # noqa: ARG002
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _EVERY_S
            self._beat()


_beats: list[Callable[[], None]] = []  # of the process that serves runs; empty in any other


def beating(beat: Callable[[], None]) -> None:
    """Call ``beat`` while runs of this process advance."""
    _beats[:] = [beat]


@contextmanager
def heartbeat(clock: Clock, total: int) -> Iterator[Observer]:  # noqa: ARG001
    """The observer of a pass that reports whether the run advances."""
    yield Heartbeat(_beats[0]) if _beats else Observer()
