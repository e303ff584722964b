"""A pipeline's stages, each with its part of the layers, and one result of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ...sched.link import Link
from ...sched.pipeline.stage import Stage, split_layers
from ..measure.bubble import NOBODY, StageTime, bubble
from ..measure.collector import Metrics, plain
from ..measure.requests import Account
from ..platform.resolve import Resolved
from ..record.result import Abstained, Metric, Outputs, RankPart, Result
from ..run.rank_context import RankContext
from .pairs import APART, first_of_each_kind, of_requests, summed, told, void
from .ranks import Assembly, all_hazards, failure


class StageReport(NamedTuple):
    """What a stage has to tell."""

    result: Result
    account: Account
    time: StageTime | None
    end: int  # ns of its own clock


def _stages(resolved: Resolved) -> Sequence[Stage]:
    wanted = resolved.scenario.engine.pipeline
    layers = split_layers(resolved.model.num_layers, wanted.stages)
    smooth = wanted.smooth_factor if wanted.dynamic_chunks else None
    return [
        Stage(index, wanted.stages, share, wanted.async_depth, wanted.skip_chunk_outputs, smooth)
        for index, share in enumerate(layers)
    ]


def _seat(resolved: Resolved, link: Link) -> RankContext:
    return RankContext(link, _stages(resolved)[link.rank])


def together(resolved: Resolved, runs: Sequence[StageReport]) -> Result:  # noqa: ARG001
    """Requests are told by the first stage, where they come in and their tokens come back to."""
    results = [run.result for run in runs]
    first, broken = results[0], failure((run.end, run.result.run.failure or "") for run in runs)
    return first.model_copy(
        update={
            "run": first.run.model_copy(update={"failure": broken}),
            "metrics": told(first, of_requests(runs[0].account, results)) | {"bubble_pct": _bubble(runs)},
            "per_step": first_of_each_kind(results),
            "copies": summed(row for result in results for row in result.copies),
            "syncs": summed(row for result in results for row in result.syncs),
            "idle": first.idle if void(first) else Abstained(abstained=APART),
            "ranks": tuple(_part(f"stage {index}", run) for index, run in enumerate(runs)),
            "outputs": _agreed(results, broken),
            "hazards": all_hazards(results),
        }
    )


def _part(name: str, run: StageReport) -> RankPart:
    result = run.result
    return RankPart(
        name=name,
        role="pipeline",
        per_step=result.per_step,
        idle=result.idle,
        metrics={**result.metrics, "bubble_pct": _bubble([run]), **_bubbles(run)},
    )


def _bubble(runs: Sequence[StageReport]) -> Metric | Abstained:
    for run in runs:
        busy = run.result.metrics["gpu_busy"]
        if isinstance(busy, Abstained):
            return busy
    return plain("bubble_pct", bubble([run.time for run in runs if run.time is not None]), exact=_exact(runs))


def _bubbles(run: StageReport) -> Metrics:
    """The stage's own bubble by the microbatch that its device waited for."""
    busy = run.result.metrics["gpu_busy"]
    if run.time is None or isinstance(busy, Abstained):
        return {}
    window = run.time.last - run.time.first
    return {
        f"bubble_pct.{'outside' if place == NOBODY else f'mb{place}'}": plain(
            "bubble_pct", 100 * idle / window, exact=_exact([run])
        )
        for place, idle in sorted(run.time.idle.items())
    }


def _exact(runs: Sequence[StageReport]) -> bool:
    return all(run.result.labels.emulated and run.result.labels.host == "modelled" for run in runs)


def _agreed(results: Sequence[Result], broken: str | None) -> Outputs | Abstained:
    if broken is not None:
        return Abstained(abstained=f"the run broke off: {broken.partition('; ')[0]}")
    outputs = [result.outputs for result in results]
    if any(other != outputs[0] for other in outputs):
        return Abstained(abstained="the stages took different tokens from the same steps")
    return outputs[0]


PIPELINE: Final = Assembly(_seat, together)
