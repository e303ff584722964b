"""Runs what a scenario asks for on as many ranks as it has, and puts their results together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from ...scenarios.failures import rank_names
from ...sched.link import Link, LinkError
from ..platform import capacity
from ..platform.hardware import LinkName, LinkProfile
from ..platform.machine import Machine, MachineError
from ..platform.resolve import Resolved
from ..record.result import Abstained, Hazards, Result
from ..run.fault_injector import inject_process_deaths
from ..run.heap import settled_heap
from ..run.machines import Chosen, OpenedRank, one_thread, open_machine, open_port, open_rank
from ..run.rank_context import ALONE, RankContext
from ..run.runner import GatedSink
from ..vgpu.gpu import patched
from .carriers import ByMessage, Carrier
from .direct import between_devices
from .failing import FailingPost
from .rank_threads import Member, run_ranks
from .virtual import VirtualLink


class RankReport(Protocol):
    """What a rank has to tell."""

    @property
    def result(self) -> Result: ...


T = TypeVar("T", bound=RankReport)
Body = Callable[[Machine, GatedSink, RankContext], T]


@dataclass(frozen=True, slots=True)
class Assembly(Generic[T]):
    """What ranks are to one another: the rank_context of each, and one result of what all have told."""

    rank_context: Callable[[Resolved, Link], RankContext]
    join: Callable[[Resolved, Sequence[T]], Result]


PATIENCE: Final = 600 * 10**9  # ns of virtual time that a rank waits for another


def alone(
    kind: Chosen,
    resolved: Resolved,
    hazards: bool,
    adversary: int | None,
    body: Body[T],
    *,
    keep_trace: Path | None,
) -> Result:
    """On one machine of its own. Raises MachineError."""
    gate = GatedSink()
    with open_machine(
        kind, resolved, gate, hazards=hazards, adversary=adversary, keep_trace=keep_trace
    ) as machine:
        return body(machine, gate, ALONE).result


def link_of(resolved: Resolved, name: LinkName) -> LinkProfile:
    """Raises MachineError where the emulated hardware has none of that name."""
    hardware = resolved.hardware
    if name not in hardware.links:
        raise MachineError(f"device.hardware: {hardware.name} has no link '{name}' to join ranks by")
    return hardware.links[name]


@dataclass(frozen=True, slots=True)
class Ranks(Generic[T]):
    """A rank_group of processes, one per rank."""

    kind: Chosen
    resolved: Resolved
    hazards: bool
    adversary: int | None
    body: Body[T]
    assembly: Assembly[T]

    @property
    def names(self) -> Sequence[str]:
        return rank_names(self.resolved.scenario)

    def carrier(self, port: OpenedRank, rank: int, *, patience: float) -> Carrier:  # noqa: ARG002
        return usual_carrier(self.kind, port)

    def opened(self, rank: int, gate: GatedSink) -> AbstractContextManager[OpenedRank]:
        return open_port(self.kind, self.resolved, gate, rank, hazards=self.hazards, adversary=self.adversary)

    def act(self, port: OpenedRank, gate: GatedSink, link: Link) -> T:
        """Raises LinkError when the run broke off: what there is of it is kept nowhere."""
        assert port.machine is not None
        way, fault_injector = inject_process_deaths(self.resolved.scenario, link)
        return unbroken(
            self.body(
                port.machine,
                gate,
                self.assembly.rank_context(self.resolved, way)._replace(fault_injector=fault_injector),
            )
        )

    def whole(self, told: Sequence[T]) -> Result:
        return self.assembly.join(self.resolved, told)


def usual_carrier(kind: Chosen, port: OpenedRank) -> Carrier:
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
        gate = GatedSink()
        with open_rank(resolved, gate, member, hazards=hazards, adversary=adversary) as (machine, gpu):
            link = VirtualLink(member, gpu, post, profile, patience=PATIENCE)
            way, fault_injector = post.with_faults(link)
            run = body(
                machine, gate, assembly.rank_context(resolved, way)._replace(fault_injector=fault_injector)
            )
            link.leave(run.result.run.failure or "")
            return run

    with one_thread(), patched(hazards=hazards), settled_heap():
        return post.told(assembly.join(resolved, run_ranks(scenario.engine.ranks, rank)))


def failure(ends: Iterable[tuple[int, str]]) -> str | None:
    """What broke the run off, in the order in which ranks came to their ends; of each, when and why."""
    in_order = sorted(ends, key=lambda entry: entry[0])
    return "; ".join(dict.fromkeys(why for _, why in in_order if why)) or None


def all_hazards(results: Sequence[Result]) -> Hazards | Abstained:
    """Of all ranks."""
    parts = [result.hazards for result in results]
    watched = [part for part in parts if isinstance(part, Hazards)]
    if len(watched) < len(parts):
        return parts[0]
    known = dict.fromkeys(name for part in watched for name in part.known)
    findings = dict.fromkeys(finding for part in watched for finding in part.findings)
    return Hazards(known=tuple(known), findings=tuple(findings))
