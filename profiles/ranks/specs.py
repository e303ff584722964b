"""The ranks of a run, as a list of specifications made from the scenario."""

from __future__ import annotations

from typing import NamedTuple

from ...scenarios.combinations import routed
from ...scenarios.failures import rank_names
from ...scenarios.schema import EngineSection
from ...sched.data_parallel.sync import RankShare
from ...sched.disagg.kv import FakeLink
from ...sched.disagg.layout import RankLayout
from ...sched.link import Link
from ...sched.pipeline import Stage, split_layers
from ..platform.resolve import Resolved
from ..run.rank_context import ALONE, FaultInjector, RankContext


class RankSpec(NamedTuple):
    """One rank, before it has a link. ``fake_transfer``: KV is announced and never sent.

    A rank runs ``RunTask.run`` on a device of its own; a router has no device and runs ``RunTask.route``."""

    name: str
    alone: RankContext  # without a link
    fake_transfer: bool = False

    @property
    def is_router(self) -> bool:
        return self.alone.place is not None and self.alone.place.role == "router"

    def context(self, link: Link, fault_injector: FaultInjector | None) -> RankContext:
        if self.fake_transfer and self.alone.place is not None:
            link = FakeLink(link, self.alone.place)
        return self.alone._replace(link=link, fault_injector=fault_injector)


def rank_specs(resolved: Resolved) -> list[RankSpec]:
    """Every rank in the order of their numbers, a router last; a single engine is the list of one."""
    engine, names = resolved.scenario.engine, rank_names(resolved.scenario)
    size = len(names)
    fake = False
    if routed(resolved.scenario):
        contexts = [RankContext(place=_layout(engine, rank)) for rank in range(size)]
        fake = engine.disaggregation.transfer == "fake"
    elif engine.data_parallel.ranks > 1:
        contexts = [RankContext(share=RankShare(rank, size)) for rank in range(size)]
    else:
        contexts = [RankContext(stage=stage) for stage in _stages(resolved)] if size > 1 else [ALONE]
    return [RankSpec(name, context, fake) for name, context in zip(names, contexts, strict=True)]


def _layout(engine: EngineSection, rank: int) -> RankLayout:
    pair = engine.disaggregation
    if pair.mode == "none":
        return RankLayout(rank, replicas=engine.replicas)
    return RankLayout(rank, pair.prefill, pair.decode)


def _stages(resolved: Resolved) -> list[Stage]:
    wanted = resolved.scenario.engine.pipeline
    layers = split_layers(resolved.model.num_layers, wanted.stages)
    smooth = wanted.smooth_factor if wanted.dynamic_chunks else None
    return [
        Stage(index, wanted.stages, share, wanted.async_depth, wanted.skip_chunk_outputs, smooth)
        for index, share in enumerate(layers)
    ]
