"""A data-parallel rank (upstream's DP attention): it plans its own requests, and steps when any rank does.

rank 0   plan | tell, hear | prefill ----------- | plan | tell, hear | decode | ...
rank 1   plan | tell, hear | idle, or its own -- | plan | tell, hear | idle   | ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..batch import ScheduleBatch
from ..data_parallel.requests import Dealt
from ..data_parallel.rounds import Round, Word, meet
from ..request import Request
from .driver import Delegate
from .idle import idle_batch
from .scheduler import Scheduler


class DataRank(Delegate):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._round = Round(())
        self._planned: Sequence[Request] = ()  # last, and perhaps not launched

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """This rank's own, or an idle one where only others have any."""
        engine = self.engine
        assert engine.link is not None and engine.share is not None
        batch = self._scheduler.get_next_batch_to_run()
        self._planned = () if batch is None else batch.reqs
        with engine.observer.range("exchange", self.next_step, engine.share.ranks):
            self._round = meet(engine.link, engine.share, self._word(batch))
        self._source.hear(self._round)
        if not any(self._round.num_tokens):
            return None
        batch = batch or idle_batch(engine, self._scheduler.take_step())
        batch.global_num_tokens = self._round.num_tokens
        batch.graph_rows = self._round.graph_rows
        return batch

    def rest(self) -> bool:
        """All ranks rest together: no more than the round tells decides how long."""
        return self._round.goes_on or self._scheduler.rest()

    def give_up(self, launched: Iterable[ScheduleBatch], reason: str) -> None:
        self._scheduler.give_up(launched, reason, held=self._planned)

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
