"""The schedulers of ranks: of a data-parallel rank; and behind a router, of a replica, a prefill worker and a decode
worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..admission import start_grammar
from ..batch import ScheduleBatch
from ..data_parallel.sync import PartitionedSource, RankStatus, SyncRound, exchange
from ..disagg.inbox import Inbox
from ..disagg.layout import HANDSHAKE, KV, REQUEST
from ..disagg.outbox import Outbox
from ..disagg.router import RoutedSource
from ..link import FOREVER, Link, LinkError
from ..observe import NO_STEP, SLEEP, StepInfo
from ..request import Request, Status
from .engine import Engine
from .prepare import filter_rows, idle_batch, prebuild
from .scheduler import Scheduler
from .settle import announce_token, close, drop, finish


class DataRank(Scheduler):
    """Plans its own requests, and runs a step whenever any data-parallel rank has one (upstream's DP attention)::

    rank 0   plan | exchange | prefill ----------- | plan | exchange | decode | ...
    rank 1   plan | exchange | idle, or its own -- | plan | exchange | idle   | ...
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._round = SyncRound(())
        self._planned: Sequence[Request] = ()  # in the last plan, which may not have been launched

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """This rank's own batch, or an idle one if only other ranks have a step."""
        engine = self.engine
        assert engine.link is not None and engine.share is not None
        batch = super().get_next_batch_to_run()
        self._planned = () if batch is None else batch.reqs
        step = self.next_step if batch is None else batch.step
        with engine.observer.range("exchange", step, engine.share.ranks):
            self._round = exchange(engine.link, engine.share, self._status(batch))
        self._source.apply(self._round)
        if not any(self._round.num_tokens):
            return None
        batch = batch or idle_batch(engine, self.take_step())
        batch.global_num_tokens = self._round.num_tokens
        batch.graph_rows = self._round.graph_rows
        return batch

    def rest(self) -> bool:
        """As ``Scheduler.rest``. All ranks sleep until the same instant, because it follows from the round alone."""
        return self._round.goes_on or super().rest()

    def held(self) -> Iterable[Request]:
        return self._planned

    @property
    def _source(self) -> PartitionedSource:
        source = self.engine.source
        assert isinstance(source, PartitionedSource), "a data-parallel rank has a part of the requests"
        return source

    def _status(self, batch: ScheduleBatch | None) -> RankStatus:
        source, busy = self._source, not self.running_batch.is_empty or bool(self.engine.tier.absent)
        ended = source.take_ended()
        if batch is None:
            return RankStatus(busy=busy, next_at=source.local_next_at(), ended=ended)
        rows = batch.batch_size if batch.forward_mode.is_decode else None
        return RankStatus(batch.num_tokens, rows, busy, source.local_next_at(), ended)


class RoutedScheduler(Scheduler):
    """A scheduler whose requests come from the router."""

    @property
    def source(self) -> RoutedSource:
        assert isinstance(self.engine.source, RoutedSource), "a worker's requests come from the router"
        return self.engine.source

    @property
    def link(self) -> Link:
        assert self.engine.link is not None
        return self.engine.link


class Replica(RoutedScheduler):
    """One of several complete engines that share nothing but the router (upstream ``--dp-size`` without data-parallel
    attention)."""

    def receive(self) -> None:
        """As ``Scheduler.receive``. Raises LinkError if the router is gone."""
        gone = self.link.gone()
        super().receive()
        if gone:
            self.source.require_router(gone)

    def rest(self) -> bool:
        if super().rest():
            return True
        if self.source.closes():
            return False
        with self.engine.observer.range(SLEEP, NO_STEP, 0):
            self.link.wait((REQUEST,), FOREVER)
        return True


POLL_INTERVAL = 100_000  # ns between two checks of pending transfers while there is nothing to run


class PrefillWorker(RoutedScheduler):
    """Computes prompts for decode workers (upstream ``SchedulerDisaggregationPrefillMixin``).

    A request waits until its decode worker has pages for it, is prefilled, and ends here when its KV has been sent. The
    one token that it gets here is the first token on its decode worker, where it ends for its client.
    """

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
                start_grammar(req, engine.grammars)
                self.waiting_queue.append(req)
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

    def held(self) -> Iterable[Request]:
        return self._outbox.requests

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


class DecodeWorker(RoutedScheduler):
    """Decodes requests whose prompts other workers compute (upstream ``SchedulerDisaggregationDecodeMixin``).

    A request gets a row and pages here, its KV is received, and it joins the running batch through a prebuilt batch.
    That batch is settled at once: the token that the prefill worker has sampled is the first one here.
    """

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

    def held(self) -> Iterable[Request]:
        return self._inbox.requests

    def abort(self, req: Request, reason: str) -> None:
        """As ``Scheduler.abort``, also for requests in the inbox."""
        if req.status is not Status.WAITING:
            super().abort(req, reason)
        elif self._inbox.withdraw(req):
            close(self.engine, req, Status.ABORTED, reason)
        else:
            req.end_with_next_token(reason)

    def _preallocate(self) -> None:
        """Allocate rows and pages to waiting requests: after the barrier, since they may have belonged to requests that
        have just ended."""
        inbox = self._inbox
        if inbox.num_waiting:
            with self.engine.observer.range("admit", NO_STEP, inbox.num_waiting):
                inbox.preallocate(self.running_batch.reqs, self.engine.relay.before_transfer)

    def _join_ready(self, ready: Sequence[Request]) -> None:
        """Let requests join by one prebuilt batch, a step without a launch."""
        engine = self.engine
        step = self.take_step()
        with engine.observer.range("prepare", step, len(ready)):
            batch = prebuild(engine, ready, step)
        info = StepInfo(step, "prebuilt", len(ready), 0, steady=False)
        engine.observer.launched(info)
        with engine.observer.range("settle", step, len(ready)):
            for req in ready:
                if req.first_token_at is None:
                    announce_token(engine, req)
                elif req.to_finish:  # it was offloaded, and has announced its first token before
                    finish(engine, req, Status.ABORTED, req.to_finish)
            filter_rows(engine, batch)
        engine.observer.settled(info)
        if engine.relay.joins(batch):
            self.join(batch)
