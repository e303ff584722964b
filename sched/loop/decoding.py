"""A decode worker (upstream ``SchedulerDisaggregationDecodeMixin``): its requests come with their prompts computed.

A request gets room here, its KV comes in, and it joins the running batch by a prebuilt one, which is settled at once:
what another worker's forward has sampled is this one's first token.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..batch import ScheduleBatch
from ..disagg.inbox import Inbox, Ready
from ..disagg.messages import KV, REQUEST
from ..link import FOREVER, LinkError
from ..observe import NO_STEP, SLEEP, StepInfo
from ..request import Request, Status
from .driver import Delegate, link_of, routed
from .prepare import filter_rows, prebuild
from .scheduler import Scheduler
from .settle import close, drop, finish, tell


class DecodeWorker(Delegate):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        inbox = scheduler.engine.inbox
        assert inbox is not None
        self._inbox: Inbox = inbox

    def receive(self) -> None:
        """Take what has arrived, requests and KV. Raises LinkError when the router is gone."""
        engine, inbox, gone = self.engine, self._inbox, link_of(self.engine).gone()
        arrived = engine.source.due(engine.clock.now())
        with engine.observer.range("receive", self.next_step, len(arrived)):
            for req in arrived:
                (inbox.expect if self._scheduler.accepts(req) else inbox.refuse)(req)
            with engine.observer.range("land", NO_STEP, 0):
                inbox.land(engine.clock.now())
            if gone:
                routed(self.engine).needs_router(gone)
                inbox.bereave(gone)
            for req, reason in inbox.failed():
                status = Status.ABORTED if req.to_finish else Status.FAILED
                drop(engine, req, status, req.to_finish or reason)

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        ready = self._inbox.take_ready()
        if ready:
            self._join(ready)
        self._preallocate()
        return self._scheduler.get_next_batch_to_run()

    def rest(self) -> bool:
        engine, inbox = self.engine, self._inbox
        if not self.running_batch.is_empty:
            return True
        if inbox.is_empty and routed(engine).closes():
            return False
        assert inbox.is_empty or inbox.awaits, "requests wait for room and nobody has any"
        until = None if inbox.awaits else FOREVER
        with engine.observer.range(SLEEP, NO_STEP, 0):
            try:
                link_of(self.engine).wait((REQUEST, KV), until)
            except LinkError as error:
                inbox.expire(str(error))
        return True

    def give_up(self, launched: Iterable[ScheduleBatch], reason: str) -> None:
        self._scheduler.give_up(launched, reason, held=self._inbox.surrender())

    def abort(self, req: Request, reason: str) -> None:
        """As ``Scheduler.abort``, wherever the request is."""
        if req.status is not Status.WAITING:
            self._scheduler.abort(req, reason)
        elif self._inbox.withdraw(req):
            close(self.engine, req, Status.ABORTED, reason)
        else:
            req.to_finish = reason

    def _preallocate(self) -> None:
        """Give room to whom there is some for: behind the barrier, since rows and pages may be those of others who have
        just ended."""
        inbox = self._inbox
        if inbox.wanting:
            with self.engine.observer.range("admit", NO_STEP, inbox.wanting):
                inbox.preallocate(self.running_batch.reqs, self.engine.relay.before_transfer)

    def _join(self, ready: list[Ready]) -> None:
        """One prebuilt batch: it is no step that anybody launches."""
        engine, scheduler = self.engine, self._scheduler
        for entry in ready:
            _commit(entry)
        step = scheduler.take_step()
        with engine.observer.range("prepare", step, len(ready)):
            batch = prebuild(engine, ready, step)
        info = StepInfo(step, "prebuilt", len(ready), 0, steady=False)
        engine.observer.launched(info)
        with engine.observer.range("settle", step, len(ready)):
            for entry in ready:
                self._begin(entry)
            filter_rows(engine, batch)
        engine.observer.settled(info)
        if engine.relay.joins(batch):
            scheduler.join(batch)

    def _begin(self, entry: Ready) -> None:
        """The first token is known here from now on; a request that comes back has been through that."""
        if entry.metadata is not None:
            tell(self.engine, entry.req)
        elif entry.req.to_finish:
            finish(self.engine, entry.req, Status.ABORTED, entry.req.to_finish)


def _commit(entry: Ready) -> None:
    """What came with the KV is the request's own."""
    req, metadata = entry.req, entry.metadata
    if metadata is not None:
        req.output_ids.append(metadata.token)
        req.output_logprobs.extend(metadata.logprobs)
        req.cached_tokens = metadata.cached_tokens
        req.first_scheduled_at = metadata.first_scheduled_at
        req.prefilled_at = metadata.prefilled_at
