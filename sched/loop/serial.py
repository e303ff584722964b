"""The loop without overlap: plan, launch, wait for the tokens, settle."""

from __future__ import annotations

from ..link import LinkError
from .launch import launch_serial
from .scheduler import Scheduler
from .speculative import launch_drafts_serial


def run_serial(scheduler: Scheduler) -> None:
    """Run until every request of the source has ended. Raises LinkError when a rank is gone without which nothing goes
    on, once nothing is left here."""
    streams = scheduler.engine.streams
    with streams.on(streams.schedule):
        try:
            _take_turns(scheduler)
        except LinkError as error:
            scheduler.give_up((), str(error))
            raise


def _take_turns(scheduler: Scheduler) -> None:
    engine = scheduler.engine
    launch = launch_serial if engine.worker is None else launch_drafts_serial
    while True:
        scheduler.receive()
        batch = scheduler.get_next_batch_to_run()
        if batch is not None:
            result = launch(engine, batch)
            scheduler.settle(scheduler.launched(batch), result)
        elif not scheduler.rest():
            return
        scheduler.last_batch = batch
