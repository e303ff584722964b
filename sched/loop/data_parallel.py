"""The scheduler of a data-parallel rank (upstream's DP attention): it plans its own requests, and runs a step whenever
any rank has one.

    rank 0   plan | exchange | prefill ----------- | plan | exchange | decode | ...
    rank 1   plan | exchange | idle, or its own -- | plan | exchange | idle   | ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..batch import ScheduleBatch
from ..data_parallel.sync import PartitionedSource, RankStatus, SyncRound, exchange
from ..request import Request
from .engine import Engine
from .prepare import idle_batch
from .scheduler import Scheduler


class DataRank(Scheduler):
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
        with engine.observer.range("exchange", self.next_step, engine.share.ranks):
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
