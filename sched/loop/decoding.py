"""A decode worker (upstream ``SchedulerDisaggregationDecodeMixin``): its requests come with their prompts computed.

A request gets room here, its KV comes in, and it joins the running batch by a prebuilt one, which is settled at once:
what another worker's forward has sampled is this one's first token.
"""

from __future__ import annotations

from ..batch import ScheduleBatch, StepResult
from ..disagg.inbox import Inbox, Ready
from ..disagg.messages import KV, REQUEST
from ..disagg.requests import Routed
from ..link import FOREVER
from ..memory.release import release_kv_cache
from ..observe import NO_STEP, SLEEP, StepInfo
from ..request import Request, Status
from .engine import Engine
from .prepare import filter_rows, prebuild
from .scheduler import Scheduler
from .settle import close, finish, tell

GONE = "its prompt was given up by its prefill worker"


class DecodeWorker:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        inbox = scheduler.engine.inbox
        assert inbox is not None
        self._inbox: Inbox = inbox

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
        """Take what has arrived, requests and KV."""
        engine, inbox = self.engine, self._inbox
        arrived = engine.source.due(engine.clock.now())
        with engine.observer.range("receive", self.next_step, len(arrived)):
            for req in arrived:
                (inbox.expect if self._scheduler.accepts(req) else inbox.refuse)(req)
            with engine.observer.range("land", NO_STEP, 0):
                inbox.land(engine.clock.now())
            for req in inbox.failed():
                self._release(req, Status.ABORTED if req.to_finish else Status.FAILED, req.to_finish or GONE)

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        ready = self._inbox.take_ready()
        if ready:
            self._join(ready)
        self._preallocate()
        return self._scheduler.get_next_batch_to_run()

    def launched(self, batch: ScheduleBatch) -> ScheduleBatch:
        return self._scheduler.launched(batch)

    def settle(self, batch: ScheduleBatch, result: StepResult) -> None:
        self._scheduler.settle(batch, result)

    def rest(self) -> bool:
        engine, inbox = self.engine, self._inbox
        if not self.running_batch.is_empty:
            return True
        if inbox.is_empty and self._source.closes():
            return False
        assert inbox.is_empty or inbox.awaits, "requests wait for room and nobody has any"
        until = None if inbox.awaits else FOREVER
        assert engine.link is not None
        with engine.observer.range(SLEEP, NO_STEP, 0):
            engine.link.wait((REQUEST, KV), until)
        return True

    def abort(self, req: Request, reason: str) -> None:
        """As ``Scheduler.abort``, wherever the request is."""
        if req.status is not Status.WAITING:
            self._scheduler.abort(req, reason)
        elif self._inbox.withdraw(req):
            close(self.engine, req, Status.ABORTED, reason)
        else:
            req.to_finish = reason

    @property
    def _source(self) -> Routed:
        source = self.engine.source
        assert isinstance(source, Routed), "a worker's requests come from the router"
        return source

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

    def _release(self, req: Request, status: Status, reason: str) -> None:
        """End a request whose KV never came."""
        speculative = self.engine.config.speculative is not None
        self.engine.tier.release(req)
        release_kv_cache(req, self.engine.cache, is_insert=False, speculative=speculative)
        close(self.engine, req, status, reason)


def _commit(entry: Ready) -> None:
    """What came with the KV is the request's own."""
    req, metadata = entry.req, entry.metadata
    if metadata is not None:
        req.output_ids.append(metadata.token)
        req.output_logprobs.extend(metadata.logprobs)
        req.cached_tokens = metadata.cached_tokens
        req.first_scheduled_at = metadata.first_scheduled_at
        req.prefilled_at = metadata.prefilled_at
