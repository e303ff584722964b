"""Schedbench's own scheduler as a system, and any system on a machine, ready to run workloads: composed, warmed up, and
measured once per pass.

A caller can replace the machine (device and clock) and the sampler, and add observers and a sink of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ...scenarios.combinations import overlaps, staged
from ...scenarios.fields import Achieved
from ...scenarios.schema import Scenario
from ...scenarios.workload import Workload
from ...sched.link import LinkError
from ...sched.loop.chunk_sizes import size_chunks
from ...sched.loop.event_loops import run_overlapped, run_serial
from ...sched.loop.multiplexed import run_multiplexed
from ...sched.loop.pipelined import run_pipelined
from ...sched.loop.scheduler import Scheduler
from ...sched.loop.workers import PrefillWorker
from ...sched.model.sampling import Sampler
from ...sched.observe import Clock, Observer
from ...sched.relay.choice import RelayChoice, loop_of
from ...sched.relay.rows import DRAFT_SWITCHES, OVERLAPPED_ONLY
from ...sched.request import Request, Status
from ..cuda.nvtx_ranges import NvtxRanges, listening, measuring
from ..measure.collector import LookupCount, RunCollector
from ..measure.steps import SleepAnnouncingClock, TimelineError
from ..measure.waiting import BubbleSink
from ..platform.machine import Machine
from ..platform.own_process import YOUNG_OBJECTS, is_frozen
from ..platform.resolve import Resolved, row_mode, speculation
from ..record.provenance import LoopName, RelayPart
from ..record.timeline import Names, Sink, Window
from .compose import Guard, compose
from .feed import Feed, measured_workload, warmup_workload
from .rank_context import ALONE, DiedError, RankContext, align
from .system import (
    MakeSystem,
    NoProgressError,
    ObserverGroup,
    ProgressWatch,
    ScriptedAborts,
    System,
    SystemParts,
    TagAudit,
)

ObserverFactory = Callable[[Clock, int], AbstractContextManager[Observer]]
"""Makes the caller's observer for one pass, from its clock and its number of requests."""


def unobserved(clock: Clock, total: int) -> AbstractContextManager[Observer]:  # noqa: ARG001
    return nullcontext(Observer())


class ExtraSink(Sink, Protocol):
    """A sink of the caller's beside the collector. Of several passes, the last one counts."""

    def begin(self) -> None:
        """A pass begins: windows of the passes before it are void."""

    def finish(self, names: Names) -> None:
        """Called after the last window."""


@dataclass(slots=True)
class GatedSink:
    """The sink of a machine. It drops windows until a pass has opened it with a collector."""

    extras: tuple[ExtraSink, ...] = ()
    collector: RunCollector | None = None
    interrupted: bool = False

    def open(self, collector: RunCollector) -> None:
        self.collector = collector
        for extra in self.extras:
            extra.begin()

    def feed(self, window: Window) -> None:
        if self.collector is not None:
            # An interruption may have come between a launch and the note of its step.
            with suppress(*((TimelineError,) if self.interrupted else ())):
                self.collector.feed(window)
            for extra in self.extras:
                extra.feed(window)

    def finish(self, names: Names) -> None:
        for extra in self.extras:
            extra.finish(names)


@contextmanager
def settled_heap() -> Iterator[None]:
    """Keep the garbage collector from walking torch's objects, and short-lived records, again and again. In a process
    that has frozen its heap before, that stays frozen."""
    thresholds, frozen = gc.get_threshold(), is_frozen()
    gc.collect()
    if not frozen:
        gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()


class OwnSystem(System):
    """Schedbench's own scheduler."""

    def __init__(self, parts: SystemParts) -> None:
        self._resolved = parts.resolved
        self._machine = parts.machine
        self._composition = compose(parts)
        self.scheduler = self._composition.scheduler
        spec = self.scheduler.engine.config.speculative
        self.simulated = spec is not None and spec.acceptance is not None
        self.aborts = not isinstance(self.scheduler, PrefillWorker)
        scenario = parts.resolved.scenario
        self.declared_hazards = parts.resolved.relay.known_hazards(
            **row_mode(scenario), split=scenario.engine.split_prefill.enabled
        )

    @property
    def next_step(self) -> int:
        return self.scheduler.next_step

    def run(self) -> None:
        loops: Mapping[LoopName, Callable[[Scheduler], None]] = {
            "overlapped": run_overlapped,
            "serial": run_serial,
            "deferred": run_serial,
            "multiplexed": run_multiplexed,
            "pipelined": run_pipelined,
        }
        loops[_loop_name(self._resolved.scenario)](self.scheduler)
        self.missed = [f"{control.action} before batch {control.at}" for control in self.scheduler.controls]

    def relay_part(self) -> RelayPart:
        relay, scenario = self._resolved.relay, self._resolved.scenario
        return RelayPart(
            state=relay.state.name,
            loop=_loop_name(scenario),
            policies=relay.policies(**row_mode(scenario)),
            switches=_switches(relay, scenario),
            faults=tuple(fault.name for fault in relay.faults),
        )

    def prepare(self) -> None:
        size_chunks(self.scheduler)

    def forget(self) -> None:
        engine = self.scheduler.engine
        with engine.streams.on(engine.streams.schedule):
            engine.cache.evict(engine.cache.evictable_size())

    def abort(self, request: Request, reason: str) -> None:
        self.scheduler.abort(request, reason)

    def unfinished(self) -> Sequence[Request]:
        return self.scheduler.unfinished()

    def guarded(self, guard: Guard | None) -> AbstractContextManager[Observer]:
        if guard is None:
            return super().guarded(guard)
        return guard.watching(self.scheduler, self._machine)

    def audit(self) -> TagAudit | None:
        tags = self._composition.tags
        if tags is None:
            return None
        return TagAudit(tags, self.scheduler.engine.slots.req_to_token, self._machine.peek)

    def lookups(self) -> LookupCount | None:
        buffers = self._composition.buffers
        if buffers is None:
            return None
        model = self._resolved.model
        alike = model.num_layers // buffers.tokens.shape[0]  # layers that one buffer stands for
        token_bytes = alike * 2 * model.kv_size * model.dtype.itemsize
        return LookupCount(buffers.lookups, self._machine.peek, token_bytes=token_bytes)


def _loop_name(scenario: Scenario) -> LoopName:
    if scenario.engine.deferred:
        return "deferred"
    if scenario.engine.split_prefill.enabled:
        return "multiplexed"
    return loop_of(overlap=overlaps(scenario), staged=staged(scenario))


def _switches(relay: RelayChoice, scenario: Scenario) -> dict[str, str]:
    """The switches that have an effect: a single stream has nothing to order, and some belong to the overlapped
    worker."""
    absent = set() if overlaps(scenario) else set(OVERLAPPED_ONLY)
    if speculation(scenario) != "v2":
        absent |= DRAFT_SWITCHES.keys()
    return {name: value for name, value in relay.switches.items() if name not in absent}


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the workload, and what was collected of it: of a run that broke off, all until then."""

    collector: RunCollector
    start: int  # ns; instants of the result count from here
    end: int
    achieved: Achieved
    damage: dict[str, int]
    cancelled: bool
    failure: str  # why it broke off, if it did
    simulated: bool  # the acceptance of drafts was simulated
    missed: Sequence[str]  # what of the scenario's controls it did not come to
    wall_s: float  # of the workload alone; used for the emulation speed only


@dataclass(slots=True)
class PreparedRun:
    """A composed scheduler on a machine, with the observers that every run has."""

    resolved: Resolved
    machine: Machine
    sink: GatedSink
    sampler: Sampler | None = None  # instead of the scheduler's own
    guard: Guard | None = None
    context: RankContext = ALONE
    make_system: MakeSystem = OwnSystem
    system: System = field(init=False)
    _observers: ObserverGroup = field(init=False)
    _feed: Feed = field(init=False)
    _clock: SleepAnnouncingClock = field(init=False)

    def __post_init__(self) -> None:
        self._feed = Feed()
        self._observers = ObserverGroup(*self._constant_observers())
        self._clock = SleepAnnouncingClock(self.machine.clock, self._observers)
        host = self.machine.host
        self.system = self.make_system(
            SystemParts(
                self.resolved,
                self.machine,
                host.excluded(self._observers),
                host.excluded(self._clock),
                host.excluded(self._feed),
                self.sampler,
                self.guard,
                self.context,
            )
        )

    @property
    def scheduler(self) -> Scheduler:
        """Schedbench's own scheduler."""
        assert isinstance(self.system, OwnSystem)
        return self.system.scheduler

    def warm_up(self) -> None:
        """Run the warm-up's requests unobserved, and drop what they left in the prefix cache."""
        self._settle_device()
        with self.system.guarded(self.guard) as guard:
            self._observers.set(*self._constant_observers(), guard)
            self.system.prepare()
        workload = warmup_workload(self.resolved)
        if workload is None:
            return
        self._load(workload)
        with self.system.guarded(self.guard) as guard:
            progress = ProgressWatch(self.system, self._clock)
            self._observers.set(*self._constant_observers(), guard, progress)
            with self._host_running():
                self.system.run()
        self.system.forget()

    def clocked(self, *more: Observer, watched: bool = True) -> float:
        """Wall seconds of the workload, run once more: observed as every measured run and by ``more``, or not at all.
        The difference is the cost of observing."""
        self.system.forget()
        collector = self._collector()
        workload = measured_workload(self.resolved)
        self._settle_device()
        self._load(workload)
        self.sink.open(collector)
        with nullcontext() if watched else self.machine.unwatched(), settled_heap():
            self._observers.set(*((self.machine.observer, *collector.observers, *more) if watched else ()))
            begin = time.perf_counter()
            self.system.run()
            seconds = time.perf_counter() - begin
        self.machine.flush()
        return seconds

    def _collector(self) -> RunCollector:
        host = self.resolved.hardware.host
        sync_return = round(host.sync_return.value) if self.machine.labels.emulated else None
        bubble = None if self.context.stage is None else BubbleSink()
        return RunCollector(self._clock, self.system.lookups(), sync_return=sync_return, bubble=bubble)

    def measure(self, observe: ObserverFactory) -> Pass:
        """Run the scenario's workload once. Ctrl-C, the loss of another rank, and a loop in which no request advances
        end it early: what was collected is kept, and marked."""
        collector, audit, injector = self._collector(), self.system.audit(), self.context.fault_injector
        workload = measured_workload(self.resolved)
        self._settle_device()
        start = self._load(workload)
        self.machine.flush()  # ranks waited for one another to begin, which belongs to no step
        self.sink.open(collector)
        cancelled, failure, begin = False, "", time.perf_counter()
        try:
            with (
                observe(self._clock, len(workload)) as own,
                self.system.guarded(self.guard) as guard,
                measuring(),
            ):
                progress = ProgressWatch(self.system, self._clock)
                if injector is not None:
                    injector.armed = True
                aborted = workload.aborts and self.system.aborts
                aborts = ScriptedAborts(self._feed, self.system) if aborted else None
                checks = [observer for observer in (aborts, audit, injector) if observer is not None]
                others = (*checks, own, guard, progress)
                self._observers.set(*self._constant_observers(), *collector.observers, *others)
                begin = time.perf_counter()
                try:
                    with self._host_running():
                        self.system.run()
                except KeyboardInterrupt:
                    self._give_up(collector, Status.CANCELLED, "interrupted")
                    cancelled = True
                except LinkError as error:
                    failure = str(error)
        except (DiedError, NoProgressError) as error:
            # The observers' own checks are left out: the rank is in no defined state.
            failure = str(error)
            self._give_up(collector, Status.FAILED, failure)
        wall_s = time.perf_counter() - begin
        self.sink.interrupted = cancelled
        self.machine.flush()
        return Pass(
            collector,
            start,
            self.machine.clock.now(),
            workload.achieved,
            {} if audit is None else audit.damage,
            cancelled,
            failure,
            self.system.simulated,
            self.system.missed,
            wall_s,
        )

    @contextmanager
    def _host_running(self) -> Iterator[None]:
        """While the scheduler's loop runs. What runs several ranks settles the heap around all of them, if at all."""
        with settled_heap() if self.context.link is None else nullcontext(), self.machine.host.running():
            yield

    def _load(self, workload: Workload) -> int:
        """The workload's start, which all ranks have in common, in ns."""
        start = align(self.context, self.machine.clock)
        self._feed.load(workload, start=start)
        return start

    def _settle_device(self) -> None:
        """Wait for the device, and deliver what it did for setting up and warming up, which belongs to no step."""
        torch.get_device_module(self.machine.device).synchronize()
        self.machine.flush()

    def _give_up(self, collector: RunCollector, status: Status, reason: str) -> None:
        """End every request that is left."""
        for request in self._feed.give_up(status, reason, self.machine.clock.now()):
            collector.requests.ended(request)

    def _constant_observers(self) -> Sequence[Observer]:
        return (self.machine.observer, *((NvtxRanges(),) if listening() else ()))
