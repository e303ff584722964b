"""The ranks of a run, made from the scenario, before they have links."""

from __future__ import annotations

from ...scenarios.combinations import MODES, routed
from ...scenarios.failures import rank_names
from ...scenarios.schema import EngineSection
from ...sched.data_parallel.sync import RankShare
from ...sched.disagg.layout import RankLayout
from ...sched.pipeline import Stage, split_layers
from ..platform.resolve import Resolved
from ..run.rank_context import RankContext


def rank_contexts(resolved: Resolved) -> list[RankContext]:
    """Every rank in the order of their numbers, a router last; a single engine is the list of one."""
    engine, names = resolved.scenario.engine, rank_names(resolved.scenario)
    size = len(names)
    if routed(resolved.scenario):
        fake = MODES["fake transfer"].on(resolved.scenario)
        return [
            RankContext(name, place=_layout(engine, rank), fake_transfer=fake)
            for rank, name in enumerate(names)
        ]
    if engine.data_parallel.ranks > 1:
        return [RankContext(name, share=RankShare(rank, size)) for rank, name in enumerate(names)]
    stages = _stages(resolved) if size > 1 else [None]
    return [RankContext(name, stage=stage) for name, stage in zip(names, stages, strict=True)]


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
