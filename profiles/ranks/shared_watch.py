"""One listener of the caller's for the runs of several workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ...sched.observe import Clock, Observer
from ..run.runner import Watch


class SharedWatch:
    """It is there from when the first worker begins until the last one is done."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._open = ExitStack()
        self._workers = 0

    @contextmanager
    def __call__(self, clock: Clock, total: int) -> Iterator[Observer]:
        if not self._workers:
            self._observer = self._open.enter_context(self._watch(clock, total))
        self._workers += 1
        try:
            yield self._observer
        finally:
            self._workers -= 1
            if not self._workers:
                self._open.close()
