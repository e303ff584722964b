"""The loop without overlap: plan, launch, wait for the tokens, settle."""

from __future__ import annotations

from ..link import LinkError
from .driver import LoopDriver
from .launch import launch_serial
from .speculative import launch_drafts_serial


def run_serial(scheduler: LoopDriver) -> None:
    """Run until every request of the source has ended. Raises LinkError when a rank is gone without which nothing goes
    on, once nothing is left here."""
    streams = scheduler.engine.streams
    with streams.on(streams.schedule):
        try:
            _take_turns(scheduler)
        except LinkError as error:
            scheduler.give_up((), str(error))
            raise


def _take_turns(scheduler: LoopDriver) -> None:
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
