"""Runs a scenario: machine, composition, warm-up, measured workload, result.

Four doors let a caller replace the world: the machine (device and clock), the seed, and listeners of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

from ...scenarios.schema import Scenario
from ...scenarios.workload import Achieved, Workload, build
from ...sched.link import LinkError
from ...sched.loop.chunk_sizes import size_chunks
from ...sched.loop.engine import TokenSampler
from ...sched.loop.overlapped import run_overlapped
from ...sched.loop.pipelined import run_pipelined
from ...sched.loop.prefilling import PrefillWorker
from ...sched.loop.scheduler import Scheduler
from ...sched.loop.serial import run_serial
from ...sched.observe import Clock, Observer
from ...sched.relay.choice import RelayChoice
from ...sched.request import Request, Status
from ..cuda.nvtx_ranges import NvtxRanges, listening, measuring
from ..measure.collector import RunCollector, Swaps
from ..measure.lookups import LookupCount
from ..measure.periods import VisibleSleep
from ..measure.steps import TimelineError
from ..platform.machine import Machine
from ..platform.resolve import Resolved
from ..record.timeline import Names, Sink, Window
from .audit import TagAudit
from .compose import Composition, Guard, compose
from .fault_injector import DiedError
from .feed import ABORTED, Feed
from .heap import settled_heap
from .observer_group import ObserverGroup
from .rank_context import ALONE, RankContext, align

# The warm-up's requests are drawn with their own seed; they are nobody's result.
WARMUP_SEED = 0x5EED


# A listener of the caller's for one run, made when the clock and the number of requests are known.
Watch = Callable[[Clock, int], AbstractContextManager[Observer]]


def nobody(clock: Clock, total: int) -> AbstractContextManager[Observer]:  # noqa: ARG001
    return nullcontext(Observer())


class Instrument(Sink, Protocol):
    """A sink of the caller's beside the answers. Where a run has several passes, the last one counts."""

    def begin(self) -> None:
        """A pass begins: what was fed before is void."""

    def finish(self, names: Names) -> None:
        """After the last window."""


@dataclass(slots=True)
class GatedSink:
    """A sink that lets windows through once there is someone to take them."""

    instrument: Instrument | None = None
    answers: RunCollector | None = None
    interrupted: bool = False

    def open(self, answers: RunCollector) -> None:
        self.answers = answers
        if self.instrument is not None:
            self.instrument.begin()

    def feed(self, window: Window) -> None:
        if self.answers is not None:
            # An interruption may have come between a launch and the note of its step.
            with suppress(*((TimelineError,) if self.interrupted else ())):
                self.answers.feed(window)
            if self.instrument is not None:
                self.instrument.feed(window)

    def finish(self, names: Names) -> None:
        if self.instrument is not None:
            self.instrument.finish(names)


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the workload, and everything that listened. Broken off, it has what there was until then."""

    answers: RunCollector
    start: int  # ns; instants of the result count from here
    end: int
    achieved: Achieved
    damage: dict[str, int]
    cancelled: bool
    failure: str  # why it broke off, if it did
    simulated: bool  # drafts were accepted by lot
    wall_s: float  # of the workload alone; nothing of the result but its speed depends on it


@dataclass(slots=True)
class PreparedRun:
    """A composed scheduler on a machine, with the listeners that every run has."""

    resolved: Resolved
    machine: Machine
    relay: RelayChoice
    gate: GatedSink
    sampler: TokenSampler | None = None  # instead of the scheduler's own
    guard: Guard | None = None
    rank_context: RankContext = ALONE
    _composition: Composition = field(init=False)
    _observers: ObserverGroup = field(init=False)
    _feed: Feed = field(init=False)
    _clock: VisibleSleep = field(init=False)

    def __post_init__(self) -> None:
        self._feed = Feed()
        self._observers = ObserverGroup(*self._always())
        self._clock = VisibleSleep(self.machine.clock, self._observers)
        self._composition = compose(
            self.resolved,
            relay=self.relay,
            machine=self.machine,
            observer=self.machine.host.excluded(self._observers),
            clock=self.machine.host.excluded(self._clock),
            source=self.machine.host.excluded(self._feed),
            sampler=self.sampler,
            guard=self.guard,
            rank_context=self.rank_context,
        )

    @property
    def scenario(self) -> Scenario:
        return self.resolved.scenario

    @property
    def scheduler(self) -> Scheduler:
        return self._composition.scheduler

    def warm_up(self) -> None:
        """Run the warm-up's requests unobserved; what they left in the prefix cache is dropped."""
        self._size_chunks()
        count = self.scenario.measure.warmup_requests
        if not count or self.scenario.workload.trace is not None:
            return
        fewer = self.scenario.workload.model_copy(update={"requests": count})
        scenario = self.scenario.model_copy(update={"workload": fewer})
        workload = self._built(scenario, self.scenario.measure.seed ^ WARMUP_SEED)
        self._load(workload)
        with self._guarded() as guard:
            self._observers.set(*self._always(), *self._aborts(workload), guard)
            self._loop()
        self.forget()

    def forget(self) -> None:
        """Drop what a run left in the prefix cache: the next one begins like it."""
        engine = self.scheduler.engine
        with engine.streams.on(engine.streams.schedule):
            engine.cache.evict(engine.cache.evictable_size())

    def clocked(self, *more: Observer, watched: bool = True) -> float:
        """Wall seconds of the workload, run once more: heard by ``more`` and what every measured run is heard by, or by
        nobody at all. What instruments cost is the difference."""
        self.forget()
        answers, workload = (
            RunCollector(self._clock, self._swaps()),
            self._built(self.scenario, self.scenario.measure.seed),
        )
        self._settle_device()
        self._load(workload)
        self.gate.open(answers)
        with nullcontext() if watched else self.machine.unwatched(), settled_heap():
            heard = (self.machine.observer, *answers.listeners, *more) if watched else ()
            self._observers.set(*heard)
            begin = time.perf_counter()
            self._drive()
            seconds = time.perf_counter() - begin
        self.machine.flush()
        return seconds

    def _size_chunks(self) -> None:
        with self._guarded() as guard:
            self._observers.set(*self._always(), guard)
            size_chunks(self.scheduler)

    def measure(self, watch: Watch) -> Pass:
        """Run the scenario's workload once. Ctrl-C, and the loss of another rank, end it early: what is there is kept,
        and marked."""
        answers, audit = RunCollector(self._clock, self._swaps()), self._audit()
        workload = self._built(self.scenario, self.scenario.measure.seed)
        self._settle_device()
        start = self._load(workload)
        self.machine.flush()  # ranks waited for one another to begin: nobody's step either
        self.gate.open(answers)
        begin = time.perf_counter()
        try:
            with watch(self._clock, len(workload)) as watcher, self._guarded() as guard, measuring():
                others = (*self._aborts(workload), *self._rest(audit), watcher, guard)
                self._observers.set(*self._always(), *answers.listeners, *others)
                begin = time.perf_counter()
                cancelled, failure = self._ran(answers)
        except DiedError as death:  # nobody asks in what state it was
            cancelled, failure = False, str(death)
            self._give_up(answers, Status.FAILED, failure)
        wall_s = time.perf_counter() - begin
        self.gate.interrupted = cancelled
        self.machine.flush()
        damage = {} if audit is None else audit.damage
        spec = self.scheduler.engine.config.speculative
        simulated = spec is not None and spec.acceptance is not None
        end = self.machine.clock.now()
        return Pass(answers, start, end, workload.achieved, damage, cancelled, failure, simulated, wall_s)

    def _settle_device(self) -> None:
        """What setting up and warming up did is nobody's step: wait for it, and have it delivered to nobody."""
        self.scheduler.engine.streams.module.synchronize()
        self.machine.flush()

    def _ran(self, answers: RunCollector) -> tuple[bool, str]:
        """Whether the run was interrupted, and why it broke off, if it did."""
        try:
            self._loop()
        except KeyboardInterrupt:
            self._give_up(answers, Status.CANCELLED, "interrupted")
            return True, ""
        except LinkError as error:
            return False, str(error)
        return False, ""

    def _rest(self, audit: TagAudit | None) -> Sequence[Observer]:
        """Listeners of some runs only."""
        fault_injector = self.rank_context.fault_injector
        if fault_injector is not None:
            fault_injector.arm()
        return [listener for listener in (audit, fault_injector) if listener is not None]

    def _swaps(self) -> Swaps | None:
        buffers = self._composition.buffers
        if buffers is None:
            return None
        model = self.resolved.model
        alike = model.num_layers // buffers.tokens.shape[0]  # layers that a buffer stands for
        return Swaps(
            LookupCount(buffers, self.machine.peek), alike * 2 * model.kv_size * model.dtype.itemsize
        )

    def _audit(self) -> TagAudit | None:
        tags = self._composition.tags
        return None if tags is None else TagAudit(tags, self.scheduler.engine.slots, self.machine.peek)

    def _always(self) -> Sequence[Observer]:
        return (self.machine.observer, *((NvtxRanges(),) if listening() else ()))

    def _guarded(self) -> AbstractContextManager[Observer]:
        if self.guard is None:
            return nullcontext(Observer())
        return self.guard.watching(self.scheduler, self.machine)

    def _aborts(self, workload: Workload) -> Sequence[Observer]:
        if not workload.aborts or isinstance(self.scheduler, PrefillWorker):
            return ()
        return (_Aborts(self._feed, self.scheduler),)

    def _built(self, scenario: Scenario, seed: int) -> Workload:
        model = self.resolved.model
        return build(scenario, vocab_size=model.vocab_size, context_len=model.max_positions, seed=seed)

    def _load(self, workload: Workload) -> int:
        clock = self.machine.clock
        start = align(self.rank_context, clock)
        self._feed.load(workload, start=start)
        return start

    def _loop(self) -> None:
        heap = settled_heap() if self.rank_context.link is None else nullcontext()
        with heap, self.machine.host.running():
            self._drive()

    def _drive(self) -> None:
        engine = self.scheduler.engine
        if engine.stage is not None:
            run_pipelined(self.scheduler)
        else:
            (run_overlapped if engine.config.overlap else run_serial)(self.scheduler)

    def _give_up(self, answers: RunCollector, status: Status, reason: str) -> None:
        for request in self._feed.alive:
            if request.finished:  # of which other ranks have not heard
                continue
            request.status = status
            request.reason = reason
            request.finished_at = self.machine.clock.now()
            answers.requests.ended(request)


class _Aborts(Observer):
    """The workload's script of clients that go away."""

    def __init__(self, feed: Feed, scheduler: Scheduler) -> None:
        self._feed = feed
        self._scheduler = scheduler

    def tokens(self, request: Request, count: int) -> None:  # noqa: ARG002
        if self._feed.aborts_now(request):
            self._scheduler.abort(request, ABORTED)
