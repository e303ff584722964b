"""The overlapped loop: while the device runs step N, the host plans N+1 and then settles N.

    host       plan N+1 | launch N+1 | settle N | plan N+2 | ...
    forward    ---- step N ----|---- step N+1 ----|---

A result is read one iteration after its launch. A request that ends in step N is still in batch N+1, and its extra
token is discarded.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from ..batch import ScheduleBatch, StepResult
from ..link import LinkError
from .launch import launch_delayed_sample, launch_overlapped
from .scheduler import Scheduler
from .speculative import awaits_grammar, launch_drafts

Results = deque[tuple[ScheduleBatch, StepResult]]
"""Steps that were launched and have not been settled."""


def run_overlapped(scheduler: Scheduler) -> None:
    """Run until every request of the source has ended. If a rank that this one depends on is gone, all requests are
    ended first; then LinkError is raised."""
    streams = scheduler.engine.streams
    results: Results = deque()
    with streams.on(streams.schedule):
        try:
            _take_turns(scheduler, results)
        except LinkError as error:
            scheduler.give_up([batch for batch, _ in results], str(error))
            raise


def _take_turns(scheduler: Scheduler, results: Results) -> None:
    engine = scheduler.engine
    launch = launch_overlapped if engine.worker is None else partial(launch_drafts, overlapped=True)
    while True:
        scheduler.receive()
        with engine.observer.range("barrier", scheduler.next_step, scheduler.running_batch.batch_size):
            engine.relay.barrier()
        batch = scheduler.get_next_batch_to_run()
        if batch is not None and results and awaits_grammar(batch):
            scheduler.settle(*results.popleft())
        if batch is not None:
            result = launch(engine, batch)
            results.append((scheduler.launched(batch), result))
        if len(results) > (batch is not None):
            scheduler.settle(*results.popleft())
        elif batch is None and not scheduler.rest():
            return
        if batch is not None:
            launch_delayed_sample(engine, result)
        scheduler.last_batch = batch
