"""What one rank of a run has: its link to the other ranks, and its part of the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...sched.data_parallel.sync import PartitionedSource, RankShare
from ...sched.disagg.layout import RankLayout
from ...sched.disagg.router import RoutedSource, WorkerSource
from ...sched.link import Link
from ...sched.model.config import ModelConfig
from ...sched.model.runner import GraphInput
from ...sched.model.tags import TagPool
from ...sched.observe import Clock
from ...sched.pipeline.source import FirstStageSource, ForwardedSource
from ...sched.pipeline.stage import Stage
from ...sched.request import RequestSource
from .fault_injector import FaultInjector

ALIGN = "align"
_SLACK = 1_000_000  # ns, by which the common start is after the latest clock, so that it reaches every rank in time
_TOKENS = torch.int64


class RankContext(NamedTuple):
    """``link``: to the other ranks, where there are any. ``stage``: the part of a pipeline. ``place``: the role behind
    a router. ``share``: the requests of a data-parallel rank. ``fault_injector``: where the scenario scripts a failure
    of the rank."""

    link: Link | None = None
    stage: Stage | None = None
    place: RankLayout | None = None
    share: RankShare | None = None
    fault_injector: FaultInjector | None = None

    @property
    def rank(self) -> int:
        if self.link is not None:
            return self.link.rank
        return 0 if self.place is None else self.place.rank

    def layers(self, model: ModelConfig) -> range:
        """The layers of the model that this rank computes."""
        return range(model.num_layers) if self.stage is None else self.stage.layers

    def source(self, source: RequestSource) -> RequestSource:
        """Where the rank's requests come from."""
        if self.place is not None:
            if self.link is None or self.link.size <= self.place.router:  # no router sends requests
                return WorkerSource(source, self.place)
            return RoutedSource(self.link, self.place)
        if self.share is not None:
            return PartitionedSource(source, self.share)
        if self.stage is None or self.link is None:
            return source
        place = self.link, self.stage
        return FirstStageSource(source, *place) if self.stage.is_first else ForwardedSource(*place)

    @property
    def reports_requests(self) -> bool:
        """Whether requests end on this rank for their clients."""
        if self.share is not None:
            return True
        return self.rank == 0 if self.place is None else self.place.ends

    @property
    def decodes(self) -> bool:
        return self.place is None or self.place.role == "decode"

    @property
    def computes_prompts(self) -> bool:
        """Whether the rank computes prompts, whose prefixes it can share: a decode worker does not."""
        return self.place is None or self.place.role != "decode"

    def proxies(self, model: ModelConfig, tags: TagPool | None) -> Sequence[GraphInput]:
        """What the rank's forwards take from the previous stage; where tags are kept, the tokens too."""
        if self.stage is None or self.stage.is_first:
            return ()
        hidden = GraphInput((model.hidden_size,), model.dtype)
        return (hidden, hidden, *(() if tags is None else (GraphInput((), _TOKENS),)))


ALONE = RankContext()


def align(context: RankContext, clock: Clock) -> int:
    """Advance every rank's clock to one common instant, not before the latest clock; return it, in ns."""
    link = context.link
    if link is None:
        return clock.now()
    if link.rank:
        link.send(0, ALIGN, clock.now())
        at: int = link.receive(0, ALIGN).value
    else:
        others = range(1, link.size)
        at = max(clock.now(), *(link.receive(rank, ALIGN).value for rank in others)) + _SLACK
        for rank in others:
            link.send(rank, ALIGN, at)
    clock.sleep_until(at)
    return at
