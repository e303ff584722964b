"""The ranks of a run, as a list of specifications made from the scenario."""

from __future__ import annotations

from dataclasses import dataclass

from ...scenarios.combinations import routed
from ...scenarios.failures import rank_names
from ...scenarios.schema import EngineSection
from ...sched.data_parallel.sync import RankShare
from ...sched.disagg.kv import FakeLink
from ...sched.disagg.layout import RankLayout
from ...sched.link import Link
from ...sched.pipeline import Stage, split_layers
from ..platform.resolve import Resolved
from ..run.rank_context import FaultInjector, RankContext


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank, before it has a link. ``fake_transfer``: KV is announced and never sent.

    A rank runs ``RunTask.run`` on a device of its own; a router has no device and runs ``RunTask.route``."""

    name: str
    stage: Stage | None = None
    place: RankLayout | None = None
    share: RankShare | None = None
    fake_transfer: bool = False

    @property
    def is_router(self) -> bool:
        return self.place is not None and self.place.role == "router"

    def alone(self) -> RankContext:
        """The rank without a link."""
        return RankContext(stage=self.stage, place=self.place, share=self.share)

    def context(self, link: Link, fault_injector: FaultInjector | None) -> RankContext:
        if self.fake_transfer and self.place is not None:
            link = FakeLink(link, self.place)
        return RankContext(link, self.stage, self.place, self.share, fault_injector)


def rank_specs(resolved: Resolved) -> list[RankSpec]:
    """Every rank in the order of their numbers, a router last; a single engine is the list of one."""
    engine, names = resolved.scenario.engine, rank_names(resolved.scenario)
    size = len(names)
    if routed(resolved.scenario):
        fake = engine.disaggregation.transfer == "fake"
        return [
            RankSpec(name, place=_layout(engine, rank), fake_transfer=fake) for rank, name in enumerate(names)
        ]
    if engine.data_parallel.ranks > 1:
        return [RankSpec(name, share=RankShare(rank, size)) for rank, name in enumerate(names)]
    if size > 1:
        return [RankSpec(name, stage=stage) for name, stage in zip(names, _stages(resolved), strict=True)]
    return [RankSpec(names[0])]


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
