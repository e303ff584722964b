"""Runs ranks in this process: a single engine on the calling thread, several ranks as threads in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final

from ...sched.observe import Clock, Observer
from ..platform import capacity
from ..platform.capacity import link_profile
from ..platform.hardware import LinkProfile
from ..platform.machine import MachineError
from ..run.crash import exits_are_crashes
from ..run.machines import one_thread, open_machine
from ..run.rank_context import ALONE, RankContext
from ..run.runner import GatedSink, ObserverFactory, settled_heap
from ..run.task import RunTask
from ..vgpu.device import CURRENT
from ..vgpu.gpu import patched
from .join import Report
from .message_router import MessageRouter
from .rank_threads import Member, SharedSimulation, run_ranks
from .virtual_link import VirtualLink, WorldClock

PATIENCE: Final = 600 * 10**9  # ns of virtual time that a rank waits for another


@exits_are_crashes()
def run_alone(task: RunTask) -> Report:
    """Run the only rank. Raises MachineError."""
    sink = GatedSink()
    with open_machine(task.kind, task.resolved, sink, task.options) as machine:
        return task.run(machine, sink, ALONE)


@exits_are_crashes()
def run_threads(task: RunTask, contexts: Sequence[RankContext]) -> tuple[list[Report], tuple[str, ...]]:
    """Run every rank on a virtual GPU of its own. Returns their reports, and the entries of the script of failures that
    the run did not come to. Raises MachineError."""
    _check(task)
    router = MessageRouter([context.name for context in contexts], task.resolved.scenario.faults)
    profile = link_profile(task.resolved)
    task = replace(task, kind="vgpu", observe=SharedObserver(task.observe))

    def run(member: Member) -> Report:
        return _run_rank(task, contexts[member.rank], member, router, profile)

    with one_thread(), patched(hazards=task.options.hazards), settled_heap():
        in_order = bool(task.resolved.scenario.faults)  # a killed rank takes back what has not left
        return run_ranks(len(contexts), run, in_order=in_order), router.missed


def _run_rank(
    task: RunTask, context: RankContext, member: Member, router: MessageRouter, profile: LinkProfile
) -> Report:
    resolved, sink = task.resolved, GatedSink()
    options = replace(task.options, hazards=task.options.hazards and not context.is_router)
    simulation = SharedSimulation(gap=round(resolved.hardware.kernels.gap.value), member=member)
    with open_machine("vgpu", resolved, sink, options, simulation=simulation) as machine:
        gpu = CURRENT.get()
        member.attach(simulation, lambda: gpu.runtime.now)
        clock = WorldClock(gpu, member)
        link = VirtualLink(member, gpu, router, profile, patience=PATIENCE)
        context = context.linked(link, resolved.scenario, link.die)
        if context.fault_injector is not None:
            router.injectors[member.rank] = context.fault_injector
        machine = replace(machine, clock=clock)
        report = task.route(clock, context) if context.is_router else task.run(machine, sink, context)
        link.leave(report.failure)
        return report


def _check(task: RunTask) -> None:
    if task.resolved.scenario.engine.disaggregation.transfer == "nixl":
        raise MachineError(
            "engine.disaggregation.transfer: nixl moves KV between processes: --world distributed"
        )
    if task.options.device == "cuda":
        raise MachineError("a virtual world has virtual GPUs; --world distributed puts ranks on real ones")
    capacity.check_world(task.resolved)


class SharedObserver:
    """One observer of the caller's for all ranks: it is made when the first rank begins, and ends with the last one."""

    def __init__(self, observe: ObserverFactory) -> None:
        self._observe = observe
        self._open = ExitStack()
        self._ranks = 0

    @contextmanager
    def __call__(self, clock: Clock, total: int) -> Iterator[Observer]:
        if not self._ranks:
            self._observer = self._open.enter_context(self._observe(clock, total))
        self._ranks += 1
        try:
            yield self._observer
        finally:
            self._ranks -= 1
            if not self._ranks:
                self._open.close()
