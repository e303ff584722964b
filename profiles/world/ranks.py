"""Runs what a scenario asks for on as many ranks as it has, and puts their results together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from ...scenarios.failures import rank_names
from ...sched.link import Link, LinkError
from ...sched.pipeline.stages import Stage, split_layers
from ..hardware import LinkName, LinkProfile
from ..metrics.bubble import NOBODY, StageTime, bubble
from ..result import Abstained, Hazards, Metric, Outputs, RankPart, Result
from ..run import capacity
from ..run.answers import Metrics, plain
from ..run.heap import settled_heap
from ..run.machine import Machine, MachineError
from ..run.machines import Chosen, Port, one_thread, open_machine, open_port, open_rank
from ..run.perils import suicidal
from ..run.resolve import Resolved
from ..run.runner import Valve
from ..run.seat import ALONE, Seat
from ..vgpu.gpu import patched
from .baton import Member, run_ranks
from .carriers import ByMessage, Carrier
from .direct import between_devices
from .failing import FailingPost
from .virtual import VirtualLink


class Told(Protocol):
    """What a rank has to tell."""

    @property
    def result(self) -> Result: ...


class RankRun(NamedTuple):
    """What a pipeline's stage has to tell."""

    result: Result
    time: StageTime | None
    end: int  # ns of its own clock


T = TypeVar("T", bound=Told)
Body = Callable[[Machine, Valve, Seat], T]


@dataclass(frozen=True, slots=True)
class Assembly(Generic[T]):
    """What ranks are to one another: the seat of each, and one result of what all have told."""

    seat: Callable[[Resolved, Link], Seat]
    join: Callable[[Resolved, Sequence[T]], Result]


PATIENCE: Final = 600 * 10**9  # ns of virtual time that a rank waits for another


def alone(
    kind: Chosen,
    resolved: Resolved,
    hazards: bool,
    adversary: int | None,
    body: Body[RankRun],
    *,
    keep_trace: Path | None,
) -> Result:
    """On one machine of its own. Raises MachineError."""
    valve = Valve()
    with open_machine(
        kind, resolved, valve, hazards=hazards, adversary=adversary, keep_trace=keep_trace
    ) as machine:
        return body(machine, valve, ALONE).result


def link_of(resolved: Resolved, name: LinkName) -> LinkProfile:
    """Raises MachineError where the emulated hardware has none of that name."""
    hardware = resolved.hardware
    if name not in hardware.links:
        raise MachineError(f"device.hardware: {hardware.name} has no link '{name}' to join ranks by")
    return hardware.links[name]


@dataclass(frozen=True, slots=True)
class Ranks(Generic[T]):
    """A troupe of processes, one per rank."""

    kind: Chosen
    resolved: Resolved
    hazards: bool
    adversary: int | None
    body: Body[T]
    assembly: Assembly[T]

    @property
    def names(self) -> Sequence[str]:
        return rank_names(self.resolved.scenario)

    def carrier(self, port: Port, rank: int, *, patience: float) -> Carrier:  # noqa: ARG002
        return usual_carrier(self.kind, port)

    def opened(self, rank: int, valve: Valve) -> AbstractContextManager[Port]:  # noqa: ARG002
        return open_port(self.kind, self.resolved, valve, hazards=self.hazards, adversary=self.adversary)

    def act(self, port: Port, valve: Valve, link: Link) -> T:
        """Raises LinkError when the run broke off: what there is of it is kept nowhere."""
        assert port.machine is not None
        way, perils = suicidal(self.resolved.scenario, link)
        return unbroken(
            self.body(port.machine, valve, self.assembly.seat(self.resolved, way)._replace(perils=perils))
        )

    def whole(self, told: Sequence[T]) -> Result:
        return self.assembly.join(self.resolved, told)


def usual_carrier(kind: Chosen, port: Port) -> Carrier:
    if kind == "vgpu":
        return ByMessage()
    return between_devices(None if port.machine is None else port.machine.device)


def unbroken(run: T) -> T:
    """Raises LinkError where it is not."""
    if run.result.run.failure is not None:
        raise LinkError(run.result.run.failure)
    return run


def virtual_world(
    resolved: Resolved, hazards: bool, adversary: int | None, body: Body[T], assembly: Assembly[T]
) -> Result:
    """On virtual GPUs of this process, one per rank. Raises MachineError."""
    capacity.check_world(resolved)
    scenario = resolved.scenario
    post, profile = FailingPost(scenario), link_of(resolved, "nvlink")

    def rank(member: Member) -> T:
        valve = Valve()
        with open_rank(resolved, valve, member, hazards=hazards, adversary=adversary) as (machine, gpu):
            link = VirtualLink(member, gpu, post, profile, patience=PATIENCE)
            way, perils = post.beset(link)
            run = body(machine, valve, assembly.seat(resolved, way)._replace(perils=perils))
            link.leave(run.result.run.failure or "")
            return run

    with one_thread(), patched(hazards=hazards), settled_heap():
        return post.told(assembly.join(resolved, run_ranks(scenario.engine.ranks, rank)))


def stages_of(resolved: Resolved) -> Sequence[Stage]:
    wanted = resolved.scenario.engine.pipeline
    layers = split_layers(resolved.model.num_layers, wanted.stages)
    smooth = wanted.smooth_factor if wanted.dynamic_chunks else None
    return [
        Stage(index, wanted.stages, share, wanted.async_depth, wanted.skip_chunk_outputs, smooth)
        for index, share in enumerate(layers)
    ]


def _stage_seat(resolved: Resolved, link: Link) -> Seat:
    return Seat(link, stages_of(resolved)[link.rank])


def together(resolved: Resolved, runs: Sequence[RankRun]) -> Result:  # noqa: ARG001
    """The first rank's result, where requests come in and go out, and what each rank did."""
    results = [run.result for run in runs]
    first, broken = results[0], failure(_ends(runs))
    return first.model_copy(
        update={
            "run": first.run.model_copy(update={"failure": broken}),
            "metrics": {**first.metrics, "bubble_pct": _bubble(runs)},
            "ranks": tuple(_part(f"stage {index}", run) for index, run in enumerate(runs)),
            "outputs": _agreed(results, broken),
            "hazards": all_hazards(results),
        }
    )


PIPELINE: Final = Assembly(_stage_seat, together)


def _ends(runs: Sequence[RankRun]) -> Sequence[tuple[int, str]]:
    return [(run.end, run.result.run.failure or "") for run in runs]


def failure(ends: Iterable[tuple[int, str]]) -> str | None:
    """What broke the run off, in the order in which ranks came to their ends; of each, when and why."""
    in_order = sorted(ends, key=lambda entry: entry[0])
    return "; ".join(dict.fromkeys(why for _, why in in_order if why)) or None


def _part(name: str, run: RankRun) -> RankPart:
    result = run.result
    return RankPart(
        name=name,
        role="pipeline",
        per_step=result.per_step,
        idle=result.idle,
        metrics={**result.metrics, "bubble_pct": _bubble([run]), **_bubbles(run)},
    )


def _bubble(runs: Sequence[RankRun]) -> Metric | Abstained:
    for run in runs:
        busy = run.result.metrics["gpu_busy"]
        if isinstance(busy, Abstained):
            return busy
    return plain("bubble_pct", bubble([run.time for run in runs if run.time is not None]), exact=_exact(runs))


def _bubbles(run: RankRun) -> Metrics:
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


def _exact(runs: Sequence[RankRun]) -> bool:
    return all(run.result.labels.emulated and run.result.labels.host == "modelled" for run in runs)


def _agreed(results: Sequence[Result], broken: str | None) -> Outputs | Abstained:
    if broken is not None:
        return Abstained(abstained=f"the run broke off: {broken.partition('; ')[0]}")
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
