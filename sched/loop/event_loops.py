"""The loops of one engine: without overlap, also with deferred results, and with it; and what a client asks of the
whole engine, which a loop carries out between two steps.

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
from ..model.sampling import sampling_of
from ..request import Status
from .blocks import launch_blocks
from .embedding import launch_embedding
from .engine import Engine
from .launch import launch_delayed_sample, launch_step
from .scheduler import Scheduler
from .speculative import awaits_grammar, launch_drafts

Launched = tuple[ScheduleBatch, StepResult]

ABORTED = "all requests were aborted"


class Controls:
    """What a client asks of the engine in one run of a loop: to pause, to give all KV back meanwhile, to end all
    requests, to flush the prefix cache. Batches are counted from the loop's beginning."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._first = scheduler.batches
        self._pending = scheduler.controls = deque(scheduler.engine.config.controls)
        self._flushes = False

    def carry_out(self, unsettled: deque[Launched]) -> None:
        """Carry out what is due, then sleep if the engine is to pause. A pause alone leaves ``unsettled`` results in
        flight; a flush waits for an idle engine."""
        scheduler, pause = self._scheduler, 0
        while self._pending and self._pending[0].at <= scheduler.batches - self._first:
            control = self._pending.popleft()
            with scheduler.engine.observer.range("control", scheduler.next_step, len(unsettled)):
                if control.action == "abort_all":
                    for req in scheduler.unfinished():
                        scheduler.abort(req, ABORTED)
                elif control.action in ("pause_and_settle", "pause_and_retract"):
                    _settle_all(scheduler, unsettled)
                    scheduler.absorb_last_batch()
                    if control.action == "pause_and_retract":
                        scheduler.retract_all()
            self._flushes |= control.action == "flush"
            pause = max(pause, control.pause)
        if self._flushes and not unsettled and not scheduler.unfinished():
            scheduler.engine.cache.evict(scheduler.engine.cache.evictable_size())
            self._flushes = False
        if pause:
            clock = scheduler.engine.clock
            clock.sleep_until(clock.now() + pause)


def _settle_all(scheduler: Scheduler, unsettled: deque[Launched]) -> None:
    while unsettled:
        scheduler.settle(*unsettled.popleft())


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
    return launch_step if overlapped else partial(launch_step, overlapped=False)


def run_serial(scheduler: Scheduler) -> None:
    """Plan, launch, wait for the tokens and settle until every request of the source has ended. Raises LinkError.

    With deferred results, for a device without side streams, events and pinned memory (upstream's MLX loop), a decode
    is launched behind the one before, whose result is read and settled only then. Nothing is copied at a launch::

        host     launch N | launch N+1 | read and settle N | launch N+2 | read and settle N+1 | ...
        device   ---- step N ---- | ---- step N+1 ---- | ...

    The chain ends where the next batch may differ: with a prompt, a request that ends, or penalties or a grammar, which
    depend on the tokens. Then every result is settled before the next batch is planned.
    """
    engine = scheduler.engine
    launch = _launch(engine, overlapped=False)
    in_flight = 1 if engine.config.deferred else 0  # results, while the next step is planned
    controls = Controls(scheduler)
    unsettled: deque[Launched] = deque()
    with _schedule_stream(scheduler, unsettled):
        while True:
            controls.carry_out(unsettled)
            scheduler.receive()
            if not _chains(scheduler, unsettled):
                _settle_all(scheduler, unsettled)
            batch = scheduler.get_next_batch_to_run()
            if batch is not None:
                result = launch(engine, batch)
                unsettled.append((scheduler.launched(batch), result))
            elif not unsettled and not scheduler.rest():
                return
            if len(unsettled) > in_flight:
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
