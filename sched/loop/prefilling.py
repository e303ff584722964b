"""The scheduler of a prefill worker (upstream ``SchedulerDisaggregationPrefillMixin``), which computes prompts for
decode workers.

A request waits until its decode worker has pages for it, is prefilled, and ends here when its KV has been sent. The one
token that it gets here is the first token on its decode worker, where it ends for its client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..batch import ScheduleBatch
from ..disagg.messages import HANDSHAKE, REQUEST
from ..disagg.outbox import Outbox
from ..link import FOREVER, LinkError
from ..observe import NO_STEP, SLEEP
from ..request import Request, Status
from .engine import Engine
from .routed import RoutedScheduler
from .settle import close, finish

POLL_INTERVAL = 100_000  # ns between two checks of pending transfers while there is nothing to run


class PrefillWorker(RoutedScheduler):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert engine.outbox is not None
        self._outbox: Outbox = engine.outbox

    def receive(self) -> None:
        """Take what has arrived, queue requests whose decode workers have pages, and end requests whose KV has been
        sent. Raises LinkError if the router is gone."""
        engine, outbox, gone = self.engine, self._outbox, self.link.gone()
        arrived = self.source.due(engine.clock.now())
        with engine.observer.range("receive", self.next_step, len(arrived)):
            for req in arrived:
                outbox.enqueue(req)
            for req in outbox.receive_handshakes():
                self.enqueue(req)
            if gone:
                self._fail_requests_for(gone)
            for req in outbox.take_dropped():
                self._drop(req, Status.ABORTED, "dropped by its decode worker")
            for req in outbox.take_sent(engine.relay.has_left):
                finish(engine, req, Status.FINISHED, "length")

    def rest(self) -> bool:
        engine, outbox = self.engine, self._outbox
        under_way = len(self.waiting_queue) + (self.chunked_req is not None)
        if not (outbox.held or outbox.is_waiting or under_way) and self.source.closes():
            outbox.close()
            return False
        assert outbox.held or not under_way, f"{under_way} requests wait and none can run"
        until = engine.clock.now() + POLL_INTERVAL if outbox.held else None if outbox.is_waiting else FOREVER
        with engine.observer.range(SLEEP, NO_STEP, 0):
            try:
                self.link.wait((REQUEST, HANDSHAKE), until)
            except LinkError as error:
                for req, why in outbox.expire(str(error)):
                    close(engine, req, Status.FAILED, why)
        return True

    def give_up(
        self, launched: Iterable[ScheduleBatch], reason: str, *, held: Iterable[Request] = ()
    ) -> None:
        super().give_up(launched, reason, held=(*self._outbox.take_all(), *held))

    def _fail_requests_for(self, gone: Mapping[int, str]) -> None:
        """Fail requests whose decode worker is among the ``gone`` ranks; prompts that are being computed are finished
        first."""
        outbox, layout = self._outbox, self.source.layout
        self.source.require_router(gone)
        for req in outbox.take_orphaned(gone):
            close(self.engine, req, Status.FAILED, layout.gone_reason(layout.decode_of(req.index), gone))
        for req in outbox.sent_to(gone):
            self._drop(req, Status.FAILED, layout.gone_reason(layout.decode_of(req.index), gone))

    def _drop(self, req: Request, status: Status, reason: str) -> None:
        """End a request that waits for its prefill. A prompt that is being computed is finished, because its decode
        worker waits for the last chunk."""
        if req in self.waiting_queue:
            self.waiting_queue.remove(req)
            self._outbox.fail(req)
            close(self.engine, req, status, reason)
