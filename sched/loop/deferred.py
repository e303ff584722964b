"""A loop for a device without side streams, events and pinned memory (upstream's MLX loop).

Nothing is copied at a launch. A decode is launched behind the one before, whose result is read and settled only then::

    host     launch N | launch N+1 | read and settle N | launch N+2 | read and settle N+1 | ...
    device   ---- step N ---- | ---- step N+1 ---- | ...

The chain ends where the next batch may differ: with a prompt, a request that ends, or penalties or a grammar, which
depend on the tokens. Then every result is settled before the next batch is planned.
"""

from __future__ import annotations

from collections import deque

from ..model.sampling_info import sampling_of
from ..request import Status
from .controls import Controls, Launched
from .launch import launch_serial
from .scheduler import Scheduler


def run_deferred(scheduler: Scheduler) -> None:
    """Run until every request of the source has ended."""
    engine = scheduler.engine
    controls = Controls(scheduler)
    unsettled: deque[Launched] = deque()
    with engine.streams.on(engine.streams.schedule):
        while True:
            controls.carry_out(unsettled)
            scheduler.receive()
            if not _chains(scheduler, unsettled):
                while unsettled:
                    scheduler.settle(*unsettled.popleft())
            batch = scheduler.get_next_batch_to_run()
            if batch is not None:
                result = launch_serial(engine, batch)
                unsettled.append((scheduler.launched(batch), result))
            elif not unsettled and not scheduler.rest():
                return
            if len(unsettled) > 1:
                scheduler.settle(*unsettled.popleft())
            scheduler.last_batch = batch


def _chains(scheduler: Scheduler, unsettled: deque[Launched]) -> bool:
    """Whether the next batch is a decode of the same requests, whatever the result in flight is."""
    if not unsettled or scheduler.waiting_queue or scheduler.chunked_req is not None:
        return False
    launched, _ = unsettled[0]
    needs = sampling_of(scheduler.running_batch).needs if launched.forward_mode.is_decode else None
    if needs is None or needs.penalties or needs.grammar:
        return False
    return all(req.status is Status.RUNNING for req in launched.reqs)
