"""The scheduler of a decode worker (upstream ``SchedulerDisaggregationDecodeMixin``), whose prompts other workers
compute.

A request gets a row and pages here, its KV is received, and it joins the running batch through a prebuilt batch. That
batch is settled at once: the token that the prefill worker has sampled is the first one here.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..batch import ScheduleBatch
from ..disagg.inbox import Inbox, ReadyRequest
from ..disagg.messages import KV, REQUEST
from ..link import FOREVER, LinkError
from ..observe import NO_STEP, SLEEP, StepInfo
from ..request import Request, Status
from .engine import Engine
from .prepare import filter_rows, prebuild
from .routed import RoutedScheduler
from .settle import announce_token, close, drop, finish


class DecodeWorker(RoutedScheduler):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert engine.inbox is not None
        self._inbox: Inbox = engine.inbox

    def receive(self) -> None:
        """Take requests and KV that have arrived. Raises LinkError if the router is gone."""
        engine, inbox, gone = self.engine, self._inbox, self.link.gone()
        arrived = self.source.due(engine.clock.now())
        with engine.observer.range("receive", self.next_step, len(arrived)):
            for req in arrived:
                (inbox.enqueue if self.accepts(req) else inbox.refuse)(req)
            with engine.observer.range("land", NO_STEP, 0):
                inbox.receive_kv(engine.clock.now())
            if gone:
                self.source.require_router(gone)
                inbox.fail_from(gone)
            for req, reason in inbox.take_failed():
                status = Status.ABORTED if req.to_finish else Status.FAILED
                drop(engine, req, status, req.to_finish or reason)

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        ready = self._inbox.take_ready()
        if ready:
            self._join_ready(ready)
        self._preallocate()
        return super().get_next_batch_to_run()

    def rest(self) -> bool:
        inbox = self._inbox
        if not self.running_batch.is_empty:
            return True
        if inbox.is_empty and self.source.closes():
            return False
        assert inbox.is_empty or inbox.is_receiving, "requests wait for pages and no request holds any"
        until = None if inbox.is_receiving else FOREVER
        with self.engine.observer.range(SLEEP, NO_STEP, 0):
            try:
                self.link.wait((REQUEST, KV), until)
            except LinkError as error:
                inbox.expire(str(error))
        return True

    def give_up(
        self, launched: Iterable[ScheduleBatch], reason: str, *, held: Iterable[Request] = ()
    ) -> None:
        super().give_up(launched, reason, held=(*self._inbox.take_all(), *held))

    def abort(self, req: Request, reason: str) -> None:
        """As ``Scheduler.abort``, also for requests in the inbox."""
        if req.status is not Status.WAITING:
            super().abort(req, reason)
        elif self._inbox.withdraw(req):
            close(self.engine, req, Status.ABORTED, reason)
        else:
            req.to_finish = reason

    def _preallocate(self) -> None:
        """Allocate rows and pages to waiting requests: after the barrier, since they may have belonged to requests that
        have just ended."""
        inbox = self._inbox
        if inbox.num_waiting:
            with self.engine.observer.range("admit", NO_STEP, inbox.num_waiting):
                inbox.preallocate(self.running_batch.reqs, self.engine.relay.before_transfer)

    def _join_ready(self, ready: list[ReadyRequest]) -> None:
        """Let requests join by one prebuilt batch, a step without a launch."""
        engine = self.engine
        for entry in ready:
            _take_metadata(entry)
        step = self.take_step()
        with engine.observer.range("prepare", step, len(ready)):
            batch = prebuild(engine, ready, step)
        info = StepInfo(step, "prebuilt", len(ready), 0, steady=False)
        engine.observer.launched(info)
        with engine.observer.range("settle", step, len(ready)):
            for entry in ready:
                self._announce_first(entry)
            filter_rows(engine, batch)
        engine.observer.settled(info)
        if engine.relay.joins(batch):
            self.join(batch)

    def _announce_first(self, entry: ReadyRequest) -> None:
        """Announce the first token of a request; one that was offloaded has announced it before."""
        if entry.metadata is not None:
            announce_token(self.engine, entry.req)
        elif entry.req.to_finish:
            finish(self.engine, entry.req, Status.ABORTED, entry.req.to_finish)


def _take_metadata(entry: ReadyRequest) -> None:
    """Copy what was received with the KV to the request."""
    req, metadata = entry.req, entry.metadata
    if metadata is not None:
        req.output_ids.append(metadata.token)
        req.output_logprobs.extend(metadata.logprobs)
        req.cached_tokens = metadata.cached_tokens
        req.first_scheduled_at = metadata.first_scheduled_at
        req.prefilled_at = metadata.prefilled_at
