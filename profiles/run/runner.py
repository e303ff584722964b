"""A scheduler on a machine, ready to run workloads: composed, warmed up, and measured once per pass.

A caller can replace the machine (device and clock) and the sampler, and add observers and a sink of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from ...scenarios.schema import Scenario
from ...scenarios.workload import Achieved, Workload
from ...sched.link import LinkError
from ...sched.loop.chunk_sizes import size_chunks
from ...sched.loop.event_loops import run_overlapped, run_serial
from ...sched.loop.pipelined import run_pipelined
from ...sched.loop.scheduler import Scheduler
from ...sched.loop.workers import PrefillWorker
from ...sched.model.sampler import TokenSampler
from ...sched.observe import Clock, Observer
from ...sched.relay.choice import RelayChoice
from ...sched.request import Status
from ..cuda.nvtx_ranges import NvtxRanges, listening, measuring
from ..measure.collector import LookupCount, RunCollector
from ..measure.steps import SleepAnnouncingClock, TimelineError
from ..platform.machine import Machine
from ..platform.resolve import Resolved
from ..record.timeline import Names, Sink, Window
from .compose import Composition, Guard, compose
from .fault_injector import DiedError
from .feed import Feed, measured_workload, warmup_workload
from .observers import ObserverGroup, ScriptedAborts, TagAudit
from .progress import NoProgressError, ProgressWatch
from .rank_context import ALONE, RankContext, align

ObserverFactory = Callable[[Clock, int], AbstractContextManager[Observer]]
"""Makes the caller's observer for one pass, from its clock and its number of requests."""

# Objects made between two collections of the youngest generation, during a run.
_YOUNG_OBJECTS: Final = 50_000


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

    extra: ExtraSink | None = None
    collector: RunCollector | None = None
    interrupted: bool = False

    def open(self, collector: RunCollector) -> None:
        self.collector = collector
        if self.extra is not None:
            self.extra.begin()

    def feed(self, window: Window) -> None:
        if self.collector is not None:
            # An interruption may have come between a launch and the note of its step.
            with suppress(*((TimelineError,) if self.interrupted else ())):
                self.collector.feed(window)
            if self.extra is not None:
                self.extra.feed(window)

    def finish(self, names: Names) -> None:
        if self.extra is not None:
            self.extra.finish(names)


@contextmanager
def settled_heap() -> Iterator[None]:
    """Keep the garbage collector from walking torch's objects, and short-lived records, again and again. In a process
    that froze its imports as it began, they stay frozen."""
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    if not frozen:
        gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()


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
    wall_s: float  # of the workload alone; used for the emulation speed only


@dataclass(slots=True)
class PreparedRun:
    """A composed scheduler on a machine, with the observers that every run has."""

    resolved: Resolved
    machine: Machine
    relay: RelayChoice
    sink: GatedSink
    sampler: TokenSampler | None = None  # instead of the scheduler's own
    guard: Guard | None = None
    context: RankContext = ALONE
    _composition: Composition = field(init=False)
    _observers: ObserverGroup = field(init=False)
    _feed: Feed = field(init=False)
    _clock: SleepAnnouncingClock = field(init=False)
    _run_loop: Callable[[], None] = field(init=False)  # until every request of the feed has ended

    def __post_init__(self) -> None:
        self._feed = Feed()
        self._observers = ObserverGroup(*self._always())
        self._clock = SleepAnnouncingClock(self.machine.clock, self._observers)
        self._composition = compose(
            self.resolved,
            choice=self.relay,
            machine=self.machine,
            observer=self.machine.host.excluded(self._observers),
            clock=self.machine.host.excluded(self._clock),
            source=self.machine.host.excluded(self._feed),
            sampler=self.sampler,
            guard=self.guard,
            context=self.context,
        )
        self._run_loop = _loop(self.scheduler)

    @property
    def scenario(self) -> Scenario:
        return self.resolved.scenario

    @property
    def scheduler(self) -> Scheduler:
        return self._composition.scheduler

    def warm_up(self) -> None:
        """Run the warm-up's requests unobserved, and drop what they left in the prefix cache."""
        with self._guarded() as guard:
            self._observers.set(*self._always(), guard)
            size_chunks(self.scheduler)
        workload = warmup_workload(self.resolved)
        if workload is None:
            return
        self._load(workload)
        with self._guarded() as guard:
            self._observers.set(
                *self._always(), *self._aborts(workload), guard, ProgressWatch(self.scheduler)
            )
            with self._host_running():
                self._run_loop()
        self.forget()

    def forget(self) -> None:
        """Drop what a run left in the prefix cache: the next run begins with the same cache."""
        engine = self.scheduler.engine
        with engine.streams.on(engine.streams.schedule):
            engine.cache.evict(engine.cache.evictable_size())

    def clocked(self, *more: Observer, watched: bool = True) -> float:
        """Wall seconds of the workload, run once more: observed as every measured run and by ``more``, or not at all.
        The difference is the cost of observing."""
        self.forget()
        collector = RunCollector(self._clock, self._lookups())
        workload = measured_workload(self.resolved)
        self._settle_device()
        self._load(workload)
        self.sink.open(collector)
        with nullcontext() if watched else self.machine.unwatched(), settled_heap():
            self._observers.set(*((self.machine.observer, *collector.observers, *more) if watched else ()))
            begin = time.perf_counter()
            self._run_loop()
            seconds = time.perf_counter() - begin
        self.machine.flush()
        return seconds

    def measure(self, observe: ObserverFactory) -> Pass:
        """Run the scenario's workload once. Ctrl-C, the loss of another rank, and a loop in which no request advances
        end it early: what was collected is kept, and marked."""
        collector, audit = RunCollector(self._clock, self._lookups()), self._audit()
        workload = measured_workload(self.resolved)
        self._settle_device()
        start = self._load(workload)
        self.machine.flush()  # ranks waited for one another to begin, which belongs to no step
        self.sink.open(collector)
        cancelled, failure, begin = False, "", time.perf_counter()
        try:
            with observe(self._clock, len(workload)) as own, self._guarded() as guard, measuring():
                progress = ProgressWatch(self.scheduler)
                others = (*self._aborts(workload), *self._of_some_runs(audit), own, guard, progress)
                self._observers.set(*self._always(), *collector.observers, *others)
                begin = time.perf_counter()
                try:
                    with self._host_running():
                        self._run_loop()
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
        damage = {} if audit is None else audit.damage
        spec = self.scheduler.engine.config.speculative
        simulated = spec is not None and spec.acceptance is not None
        end = self.machine.clock.now()
        return Pass(collector, start, end, workload.achieved, damage, cancelled, failure, simulated, wall_s)

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
        self.scheduler.engine.streams.module.synchronize()
        self.machine.flush()

    def _give_up(self, collector: RunCollector, status: Status, reason: str) -> None:
        """End every request that is left."""
        for request in self._feed.alive:
            if request.finished:  # and other ranks have not received that yet
                continue
            request.status = status
            request.reason = reason
            request.finished_at = self.machine.clock.now()
            collector.requests.ended(request)

    def _always(self) -> Sequence[Observer]:
        return (self.machine.observer, *((NvtxRanges(),) if listening() else ()))

    def _of_some_runs(self, audit: TagAudit | None) -> Sequence[Observer]:
        fault_injector = self.context.fault_injector
        if fault_injector is not None:
            fault_injector.arm()
        return [observer for observer in (audit, fault_injector) if observer is not None]

    def _aborts(self, workload: Workload) -> Sequence[Observer]:
        if not workload.aborts or isinstance(self.scheduler, PrefillWorker):
            return ()
        return (ScriptedAborts(self._feed, self.scheduler),)

    def _guarded(self) -> AbstractContextManager[Observer]:
        if self.guard is None:
            return nullcontext(Observer())
        return self.guard.watching(self.scheduler, self.machine)

    def _audit(self) -> TagAudit | None:
        tags = self._composition.tags
        return None if tags is None else TagAudit(tags, self.scheduler.engine.slots, self.machine.peek)

    def _lookups(self) -> LookupCount | None:
        buffers = self._composition.buffers
        if buffers is None:
            return None
        model = self.resolved.model
        alike = model.num_layers // buffers.tokens.shape[0]  # layers that one buffer stands for
        token_bytes = alike * 2 * model.kv_size * model.dtype.itemsize
        return LookupCount(buffers, self.machine.peek, token_bytes=token_bytes)


def _loop(scheduler: Scheduler) -> Callable[[], None]:
    if scheduler.engine.stage is not None:
        return partial(run_pipelined, scheduler)
    return partial(run_overlapped if scheduler.engine.config.overlap else run_serial, scheduler)
