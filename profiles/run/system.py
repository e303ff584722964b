"""What a run measures: schedbench's own scheduler, or the scheduler of another engine (``profiles.engines``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from ...scenarios.combinations import overlaps, staged
from ...scenarios.schema import Scenario
from ...sched.config import EngineConfig
from ...sched.loop.chunk_sizes import size_chunks
from ...sched.loop.deferred import run_deferred
from ...sched.loop.event_loops import run_overlapped, run_serial
from ...sched.loop.multiplexed import run_multiplexed
from ...sched.loop.pipelined import run_pipelined
from ...sched.loop.scheduler import Scheduler
from ...sched.loop.workers import PrefillWorker
from ...sched.observe import Observer
from ...sched.relay.choice import RelayChoice, loop_of
from ...sched.relay.switches import DRAFT_SWITCHES, OVERLAPPED_ONLY
from ...sched.request import Request
from ..measure.collector import LookupCount
from ..platform.resolve import speculation
from ..record.provenance import LoopName, RelayPart
from .compose import Guard, compose
from .compose import SystemParts as SystemParts
from .observers import TagAudit


class System(ABC):
    """A scheduler with its model on a machine. This base class has no hooks for checks and counts: a system overrides
    those that it offers."""

    simulated = False  # the acceptance of drafts is simulated
    aborts = True  # requests can be aborted here
    defaults: Collection[str] = ()  # what an engine's system answered by a constant
    declared_hazards: Sequence[str] = ()  # names of those that its relay state declares

    @property
    @abstractmethod
    def next_step(self) -> int:
        """The number of the step that is planned next."""

    @abstractmethod
    def relay_part(self) -> RelayPart:
        """What the result says about how steps hand on their results."""

    def prepare(self) -> None:  # noqa: B027 (not every system has to)
        """Called once, before the first request."""

    @abstractmethod
    def run(self) -> None:
        """Run until every request of the source has ended. Raises LinkError where another rank is gone."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what a run left in the prefix cache, so that the next run begins with the same cache."""

    @abstractmethod
    def abort(self, request: Request, reason: str) -> None:
        """End the request early, at once or when its next token arrives."""

    @abstractmethod
    def unfinished(self) -> Sequence[Request]:
        """The requests that were taken from the source and have not ended."""

    def guarded(self, guard: Guard | None) -> AbstractContextManager[Observer]:  # noqa: ARG002
        """The guard's observer of one workload."""
        return nullcontext(Observer())

    def audit(self) -> TagAudit | None:
        """The audit of KV tags, with values none."""
        return None

    def lookups(self) -> LookupCount | None:
        """The counts of lookups, where KV is on the host."""
        return None


MakeSystem = Callable[[SystemParts], System]


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
        self._relay = parts.relay
        scenario = parts.resolved.scenario
        self.declared_hazards = parts.relay.known_hazards(
            overlap=overlaps(scenario),
            speculation=speculation(scenario),
            staged=staged(scenario),
            split=scenario.engine.split_prefill.enabled,
        )

    @property
    def next_step(self) -> int:
        return self.scheduler.next_step

    def run(self) -> None:
        scheduler = self.scheduler
        if scheduler.engine.stage is not None:
            run_pipelined(scheduler)
        else:
            _loop(scheduler.engine.config)(scheduler)

    def relay_part(self) -> RelayPart:
        relay, scenario = self._relay, self._resolved.scenario
        return RelayPart(
            state=relay.state.name,
            loop=_loop_name(scenario),
            policies=relay.policies(
                overlap=overlaps(scenario), speculation=speculation(scenario), staged=staged(scenario)
            ),
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
        return LookupCount(buffers, self._machine.peek, token_bytes=token_bytes)


def _loop_name(scenario: Scenario) -> LoopName:
    if scenario.engine.deferred:
        return "deferred"
    if scenario.engine.split_prefill.enabled:
        return "multiplexed"
    return loop_of(overlap=overlaps(scenario), staged=staged(scenario))


def _loop(config: EngineConfig) -> Callable[[Scheduler], None]:
    if config.deferred:
        return run_deferred
    if config.split_prefill is not None:
        return run_multiplexed
    return run_overlapped if config.overlap else run_serial


def _switches(relay: RelayChoice, scenario: Scenario) -> dict[str, str]:
    """The switches that have an effect: a single stream has nothing to order, and some belong to the overlapped
    worker."""
    absent = set() if overlaps(scenario) else set(OVERLAPPED_ONLY)
    if speculation(scenario) != "v2":
        absent |= DRAFT_SWITCHES.keys()
    return {name: value for name, value in relay.switches.items() if name not in absent}
