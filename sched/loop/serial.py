"""The loop without overlap: plan, launch, wait for the tokens, settle."""

from __future__ import annotations

from .launch import launch_serial
from .speculative import launch_drafts_serial
from .turns import Turns


def run_serial(scheduler: Turns) -> None:
    """Run until every request of the source has ended."""
    engine = scheduler.engine
    streams = engine.streams
    launch = launch_serial if engine.worker is None else launch_drafts_serial
    with streams.on(streams.schedule):
        while True:
            scheduler.receive()
            batch = scheduler.get_next_batch_to_run()
            if batch is not None:
                result = launch(engine, batch)
                scheduler.settle(scheduler.launched(batch), result)
            elif not scheduler.rest():
                return
            scheduler.last_batch = batch
