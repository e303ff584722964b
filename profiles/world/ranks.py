"""Runs what a scenario asks for on as many ranks as it has, and puts their results together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from ...sched.pipeline.stages import Stage, split_layers
from .. import capacity
from ..answers import plain
from ..heap import settled_heap
from ..machine import Machine
from ..machines import one_thread, open_machine, open_rank
from ..resolve import Resolved
from ..result import Abstained, Hazards, Metric, Outputs, RankPart, Result
from ..runner import Valve
from ..seat import ALONE, Seat
from ..vgpu.gpu import patched
from .baton import Member, run_ranks
from .virtual import Inbox, VirtualLink

Body = Callable[[Machine, Valve, Seat], Result]

PATIENCE: Final = 600 * 10**9  # ns of virtual time that a rank waits for another


def alone(
    kind: Literal["cuda", "vgpu"], resolved: Resolved, hazards: bool, adversary: int | None, body: Body
) -> Result:
    """On one machine of its own. Raises MachineError."""
    valve = Valve()
    with open_machine(kind, resolved, valve, hazards=hazards, adversary=adversary) as machine:
        return body(machine, valve, ALONE)


def virtual_world(resolved: Resolved, hazards: bool, adversary: int | None, body: Body) -> Result:
    """On virtual GPUs of this process, one per rank. Raises MachineError."""
    capacity.check(resolved)
    count = resolved.scenario.engine.ranks
    inboxes = [Inbox() for _ in range(count)]
    stages = _stages(resolved)

    def rank(member: Member) -> Result:
        valve = Valve()
        with open_rank(resolved, valve, member, hazards=hazards, adversary=adversary) as (machine, gpu):
            profile = resolved.hardware.links["nvlink"]
            link = VirtualLink(member, gpu, inboxes, profile, patience=PATIENCE)
            return body(machine, valve, Seat(link, stages[member.rank]))

    with one_thread(), patched(hazards=hazards), settled_heap():
        return together(run_ranks(count, rank))


def _stages(resolved: Resolved) -> Sequence[Stage]:
    wanted = resolved.scenario.engine.pipeline
    layers = split_layers(resolved.model.num_layers, wanted.stages)
    return [Stage(index, wanted.stages, share, wanted.async_depth) for index, share in enumerate(layers)]


def together(results: Sequence[Result]) -> Result:
    """The first rank's result, where requests come in and go out, and what each rank did."""
    first = results[0]
    return first.model_copy(
        update={
            "metrics": {**first.metrics, "bubble_pct": _bubble(results)},
            "ranks": tuple(
                RankPart(
                    name=f"stage {index}",
                    role="pipeline",
                    per_step=result.per_step,
                    idle=result.idle,
                    metrics=result.metrics,
                )
                for index, result in enumerate(results)
            ),
            "outputs": _agreed(results),
            "hazards": all_hazards(results),
        }
    )


def _bubble(results: Sequence[Result]) -> Metric | Abstained:
    """1 - sum of busy times over stages times window, in percent."""
    busy = [result.metrics["gpu_busy"] for result in results]
    shares = [metric.values[0] for metric in busy if isinstance(metric, Metric)]
    if len(shares) < len(busy):
        return Abstained(abstained="a stage ran nothing")
    return plain("bubble_pct", 100 * (1 - sum(shares) / len(shares)), exact=first_exact(busy))


def first_exact(metrics: Sequence[Metric | Abstained]) -> bool:
    return all(metric.exact for metric in metrics if isinstance(metric, Metric))


def _agreed(results: Sequence[Result]) -> Outputs | Abstained:
    outputs = [result.outputs for result in results]
    if any(other != outputs[0] for other in outputs):
        return Abstained(abstained="the stages took different tokens from the same steps")
    return outputs[0]


def all_hazards(results: Sequence[Result]) -> Hazards | Abstained:
    """Of all ranks."""
    parts = [result.hazards for result in results]
    watched = [part for part in parts if isinstance(part, Hazards)]
    if len(watched) < len(parts):
        return parts[0]
    known = dict.fromkeys(name for part in watched for name in part.known)
    findings = dict.fromkeys(finding for part in watched for finding in part.findings)
    return Hazards(known=tuple(known), findings=tuple(findings))
