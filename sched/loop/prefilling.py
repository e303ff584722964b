"""A prefill worker (upstream ``SchedulerDisaggregationPrefillMixin``): prompts are computed here, decoded elsewhere.

A request waits for its decode worker, is prefilled, and goes once its KV has left. Its one token is the first one that
its decode worker begins with. It ends for its client over there.
"""

from __future__ import annotations

from ..batch import ScheduleBatch, StepResult
from ..disagg.messages import HANDSHAKE, REQUEST
from ..disagg.outbox import Outbox
from ..disagg.requests import Routed
from ..link import FOREVER
from ..observe import NO_STEP, SLEEP
from ..request import Request, Status
from .engine import Engine
from .scheduler import Scheduler
from .settle import close, finish

GLANCE = 100_000  # ns between two looks at transfers that are under way while there is nothing to run


class PrefillWorker:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        outbox = scheduler.engine.outbox
        assert outbox is not None
        self._outbox: Outbox = outbox

    @property
    def engine(self) -> Engine:
        return self._scheduler.engine

    @property
    def next_step(self) -> int:
        return self._scheduler.next_step

    @property
    def last_batch(self) -> ScheduleBatch | None:
        return self._scheduler.last_batch

    @last_batch.setter
    def last_batch(self, batch: ScheduleBatch | None) -> None:
        self._scheduler.last_batch = batch

    @property
    def running_batch(self) -> ScheduleBatch:
        return self._scheduler.running_batch

    def receive(self) -> None:
        """Take what has arrived; queue what its decode worker has room for; let go of what has left."""
        engine, outbox = self.engine, self._outbox
        arrived = engine.source.due(engine.clock.now())
        with engine.observer.range("receive", self.next_step, len(arrived)):
            for req in arrived:
                outbox.expect(req)
            for req in outbox.hear():
                self._scheduler.enqueue(req)
            for req in outbox.dropped():
                self._drop(req)
            for req in outbox.gone(engine.relay.has_left):
                finish(engine, req, Status.FINISHED, "length")

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        return self._scheduler.get_next_batch_to_run()

    def launched(self, batch: ScheduleBatch) -> ScheduleBatch:
        return self._scheduler.launched(batch)

    def settle(self, batch: ScheduleBatch, result: StepResult) -> None:
        self._scheduler.settle(batch, result)

    def rest(self) -> bool:
        engine, outbox, scheduler = self.engine, self._outbox, self._scheduler
        under_way = len(scheduler.waiting_queue) + (scheduler.chunked_req is not None)
        if not (outbox.held or outbox.waits or under_way) and self._source.closes():
            outbox.close()
            return False
        assert outbox.held or not under_way, f"{under_way} requests wait and none can run"
        until = engine.clock.now() + GLANCE if outbox.held else None if outbox.waits else FOREVER
        assert engine.link is not None
        with engine.observer.range(SLEEP, NO_STEP, 0):
            engine.link.wait((REQUEST, HANDSHAKE), until)
        return True

    @property
    def _source(self) -> Routed:
        source = self.engine.source
        assert isinstance(source, Routed), "a worker's requests come from the router"
        return source

    def _drop(self, req: Request) -> None:
        """Its client has gone. A prompt that is under way is finished all the same: its decode worker waits for
        the last of it."""
        scheduler = self._scheduler
        if req in scheduler.waiting_queue:
            scheduler.waiting_queue.remove(req)
            self._outbox.fail(req)
            close(self.engine, req, Status.ABORTED, "dropped by its decode worker")
