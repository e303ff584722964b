"""A data-parallel rank (upstream's DP attention): it plans its own requests, and steps when any rank does.

rank 0   plan | tell, hear | prefill ----------- | plan | tell, hear | decode | ...
rank 1   plan | tell, hear | idle, or its own -- | plan | tell, hear | idle   | ...
"""

from __future__ import annotations

from ..batch import ScheduleBatch, StepResult
from ..data_parallel.requests import Dealt
from ..data_parallel.rounds import Round, Word, meet
from ..request import Request
from .engine import Engine
from .idle import idle_batch
from .scheduler import Scheduler


class DataRank:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._round = Round(())

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
        self._scheduler.receive()

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """This rank's own, or an idle one where only others have any."""
        engine = self.engine
        assert engine.link is not None and engine.share is not None
        batch = self._scheduler.get_next_batch_to_run()
        with engine.observer.range("exchange", self.next_step, engine.share.ranks):
            self._round = meet(engine.link, engine.share, self._word(batch))
        self._source.hear(self._round)
        if not any(self._round.num_tokens):
            return None
        batch = batch or idle_batch(engine, self._scheduler.take_step())
        batch.global_num_tokens = self._round.num_tokens
        batch.graph_rows = self._round.graph_rows
        return batch

    def launched(self, batch: ScheduleBatch) -> ScheduleBatch:
        return self._scheduler.launched(batch)

    def settle(self, batch: ScheduleBatch, result: StepResult) -> None:
        self._scheduler.settle(batch, result)

    def rest(self) -> bool:
        """All ranks rest together: no more than the round tells decides how long."""
        return self._round.goes_on or self._scheduler.rest()

    def abort(self, req: Request, reason: str) -> None:
        self._scheduler.abort(req, reason)

    @property
    def _source(self) -> Dealt:
        source = self.engine.source
        assert isinstance(source, Dealt), "a data-parallel rank has a part of the requests"
        return source

    def _word(self, batch: ScheduleBatch | None) -> Word:
        source, busy = self._source, not self.running_batch.is_empty or bool(self.engine.tier.absent)
        ended = source.news()
        if batch is None:
            return Word(busy=busy, next_at=source.upcoming(), ended=ended)
        rows = batch.batch_size if batch.forward_mode.is_decode else None
        return Word(batch.num_tokens, rows, busy, source.upcoming(), ended)
