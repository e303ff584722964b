"""What a client asks of the whole engine: to pause, to give all KV back meanwhile, to end all requests, to flush the
prefix cache. A loop carries it out between two steps, while the result of the last one may be in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from ..batch import ScheduleBatch, StepResult
from ..config import ControlAction
from .scheduler import Scheduler

Launched = tuple[ScheduleBatch, StepResult]

ABORTED = "all requests were aborted"


class Controls:
    """The controls of one run of a loop; batches are counted from its beginning."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._first = scheduler.batches
        self._pending = deque(scheduler.engine.config.controls)
        self._flushes = False

    def carry_out(self, unsettled: deque[Launched]) -> None:
        """Carry out what is due, then sleep if the engine is to pause. A pause alone leaves ``unsettled`` results in
        flight."""
        scheduler, pause = self._scheduler, 0
        while self._pending and self._pending[0].at <= scheduler.batches - self._first:
            control = self._pending.popleft()
            with scheduler.engine.observer.range("control", scheduler.next_step, len(unsettled)):
                _ACTIONS[control.action](scheduler, unsettled)
            self._flushes |= control.action == "flush"
            pause = max(pause, control.pause)
        if self._flushes and not unsettled and not scheduler.unfinished():
            scheduler.engine.cache.evict(scheduler.engine.cache.evictable_size())
            self._flushes = False
        if pause:
            clock = scheduler.engine.clock
            clock.sleep_until(clock.now() + pause)


def _leave_all(scheduler: Scheduler, unsettled: deque[Launched]) -> None:
    """Change nothing at once: a pause in place, or a flush, which waits for an idle engine."""


def _settle_all(scheduler: Scheduler, unsettled: deque[Launched]) -> None:
    while unsettled:
        scheduler.settle(*unsettled.popleft())
    scheduler.absorb_last_batch()


def _retract_all(scheduler: Scheduler, unsettled: deque[Launched]) -> None:
    _settle_all(scheduler, unsettled)
    scheduler.retract_all()


def _abort_all(scheduler: Scheduler, unsettled: deque[Launched]) -> None:  # noqa: ARG001
    for req in scheduler.unfinished():
        scheduler.abort(req, ABORTED)


_ACTIONS: Mapping[ControlAction, Callable[[Scheduler, deque[Launched]], None]] = {
    "pause": _leave_all,
    "pause_and_settle": _settle_all,
    "pause_and_retract": _retract_all,
    "abort_all": _abort_all,
    "flush": _leave_all,
}
