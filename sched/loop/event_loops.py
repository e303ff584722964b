"""The loops of one engine, without overlap and with it.

The overlapped loop plans N+1 and then settles N while the device runs step N::

    host       plan N+1 | launch N+1 | settle N | plan N+2 | ...
    forward    ---- step N ----|---- step N+1 ----|---

A result is read one iteration after its launch. A request that ends in step N is still in batch N+1, and its extra
token is discarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from ..batch import ScheduleBatch, StepResult
from ..link import LinkError
from .blocks import launch_blocks
from .controls import Controls, Launched
from .embedding import launch_embedding
from .engine import Engine
from .launch import launch_delayed_sample, launch_overlapped, launch_serial
from .scheduler import Scheduler
from .speculative import awaits_grammar, launch_drafts


@contextmanager
def _schedule_stream(scheduler: Scheduler, unsettled: Collection[Launched]) -> Iterator[None]:
    """Run on the schedule stream. If a rank that this one depends on is gone, all requests are ended before LinkError
    is raised; the ``unsettled`` steps stay so."""
    streams = scheduler.engine.streams
    with streams.on(streams.schedule):
        try:
            yield
        except LinkError as error:
            scheduler.give_up([batch for batch, _ in unsettled], str(error))
            raise


def _launch(engine: Engine, *, overlapped: bool) -> Callable[[Engine, ScheduleBatch], StepResult]:
    if engine.config.blocks is not None:
        return launch_blocks
    if engine.config.embedding:
        return partial(launch_embedding, overlapped=overlapped)
    if engine.worker is not None:
        return partial(launch_drafts, overlapped=overlapped)
    return launch_overlapped if overlapped else launch_serial


def run_serial(scheduler: Scheduler) -> None:
    """Plan, launch, wait for the tokens and settle until every request of the source has ended. Raises LinkError."""
    engine = scheduler.engine
    launch = _launch(engine, overlapped=False)
    controls = Controls(scheduler)
    with _schedule_stream(scheduler, ()):
        while True:
            controls.carry_out(deque())
            scheduler.receive()
            batch = scheduler.get_next_batch_to_run()
            if batch is not None:
                result = launch(engine, batch)
                scheduler.settle(scheduler.launched(batch), result)
            elif not scheduler.rest():
                return
            scheduler.last_batch = batch


def run_overlapped(scheduler: Scheduler) -> None:
    """Run until every request of the source has ended. Raises LinkError."""
    engine = scheduler.engine
    launch = _launch(engine, overlapped=True)
    results: deque[Launched] = deque()
    controls = Controls(scheduler)
    with _schedule_stream(scheduler, results):
        while True:
            controls.carry_out(results)
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
