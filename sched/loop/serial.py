"""The loop without overlap: plan, launch, wait for the tokens, settle."""

from __future__ import annotations

from functools import partial

from ..link import LinkError
from .launch import launch_serial
from .scheduler import Scheduler
from .speculative import launch_drafts


def run_serial(scheduler: Scheduler) -> None:
    """Run until every request of the source has ended. If a rank that this one depends on is gone, all requests are
    ended first; then LinkError is raised."""
    streams = scheduler.engine.streams
    with streams.on(streams.schedule):
        try:
            _take_turns(scheduler)
        except LinkError as error:
            scheduler.give_up((), str(error))
            raise


def _take_turns(scheduler: Scheduler) -> None:
    engine = scheduler.engine
    launch = launch_serial if engine.worker is None else partial(launch_drafts, overlapped=False)
    while True:
        scheduler.receive()
        batch = scheduler.get_next_batch_to_run()
        if batch is not None:
            result = launch(engine, batch)
            scheduler.settle(scheduler.launched(batch), result)
        elif not scheduler.rest():
            return
        scheduler.last_batch = batch
