"""A prefill worker (upstream ``SchedulerDisaggregationPrefillMixin``): prompts are computed here, decoded elsewhere.

A request waits for its decode worker, is prefilled, and goes once its KV has left. Its one token is the first one that
its decode worker begins with. It ends for its client over there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..batch import ScheduleBatch
from ..disagg.messages import HANDSHAKE, REQUEST
from ..disagg.outbox import Outbox
from ..disagg.requests import lost
from ..link import FOREVER, LinkError
from ..observe import NO_STEP, SLEEP
from ..request import Request, Status
from .driver import Delegate, link_of, routed
from .scheduler import Scheduler
from .settle import close, finish

GLANCE = 100_000  # ns between two looks at transfers that are under way while there is nothing to run


class PrefillWorker(Delegate):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        outbox = scheduler.engine.outbox
        assert outbox is not None
        self._outbox: Outbox = outbox

    def receive(self) -> None:
        """Take what has arrived; queue what its decode worker has room for; let go of what has left. Raises LinkError
        when the router is gone."""
        engine, outbox, gone = self.engine, self._outbox, link_of(self.engine).gone()
        arrived = engine.source.due(engine.clock.now())
        with engine.observer.range("receive", self.next_step, len(arrived)):
            for req in arrived:
                outbox.expect(req)
            for req in outbox.hear():
                self._scheduler.enqueue(req)
            if gone:
                self._mourn(gone)
            for req in outbox.dropped():
                self._drop(req, Status.ABORTED, "dropped by its decode worker")
            for req in outbox.gone(engine.relay.has_left):
                finish(engine, req, Status.FINISHED, "length")

    def rest(self) -> bool:
        engine, outbox, scheduler = self.engine, self._outbox, self._scheduler
        under_way = len(scheduler.waiting_queue) + (scheduler.chunked_req is not None)
        if not (outbox.held or outbox.waits or under_way) and routed(engine).closes():
            outbox.close()
            return False
        assert outbox.held or not under_way, f"{under_way} requests wait and none can run"
        until = engine.clock.now() + GLANCE if outbox.held else None if outbox.waits else FOREVER
        with engine.observer.range(SLEEP, NO_STEP, 0):
            try:
                link_of(self.engine).wait((REQUEST, HANDSHAKE), until)
            except LinkError as error:
                for req, why in outbox.expire(str(error)):
                    close(engine, req, Status.FAILED, why)
        return True

    def give_up(self, launched: Iterable[ScheduleBatch], reason: str) -> None:
        self._scheduler.give_up(launched, reason, held=self._outbox.surrender())

    def _mourn(self, gone: Mapping[int, str]) -> None:
        """Nothing more is computed for decode workers that are gone; what is under way comes to its end."""
        outbox, place = self._outbox, routed(self.engine).place
        routed(self.engine).needs_router(gone)
        for req in outbox.orphaned(gone):
            close(self.engine, req, Status.FAILED, lost(place, place.decode_of(req.index), gone))
        for req in outbox.sent_to(gone):
            self._drop(req, Status.FAILED, lost(place, place.decode_of(req.index), gone))

    def _drop(self, req: Request, status: Status, reason: str) -> None:
        """Nobody wants it any more. A prompt that is under way is finished all the same: its decode worker waits for
        the last of it."""
        scheduler = self._scheduler
        if req in scheduler.waiting_queue:
            scheduler.waiting_queue.remove(req)
            self._outbox.fail(req)
            close(self.engine, req, status, reason)
