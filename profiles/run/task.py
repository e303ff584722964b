"""What every rank of a run does, in whatever world: one scenario, run and measured, as a report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from ...sched.disagg.router import run_router
from ...sched.observe import Clock, Observer
from ...sched.request import Request, Status
from ..measure.requests import RequestTotals, record_of
from ..measure.waiting import StageTime
from ..platform.machine import Machine
from ..platform.resolve import Resolved
from ..record.recording import RESULT, TimelineRecording, timeline_file
from ..record.result import OWN_CLOCKS, RequestRow, Result
from .compose import Guard
from .crash import broken_on_purpose
from .document import measured, request_row, result_of, run_part, uncounted, untimed
from .feed import Feed, measured_workload, warmup_workload
from .machines import DeviceKind, Options
from .rank_context import DiedError, RankContext, align
from .runner import ExtraSink, GatedSink, ObserverFactory, OwnSystem, PreparedRun, unobserved
from .system import MakeSystem, ObserverGroup


class RouterReport(NamedTuple):
    """``rows``: requests that ended at the router, or nowhere. ``failure``: why the run broke off, if it did. ``end``:
    ns of the router's clock."""

    rows: Sequence[RequestRow]
    failure: str
    end: int


class RankReport(NamedTuple):
    """What a rank with a device reports: its own result, and what a result of several ranks is computed from.

    ``stage_time``: busy and idle times of a pipeline's stage, None where no kernel ran. ``damage``: by request, the sum
    of its KV tags that do not add up. ``end``: ns of the rank's own clock."""

    result: Result
    account: RequestTotals
    stage_time: StageTime | None
    damage: Mapping[str, int]
    end: int

    @property
    def failure(self) -> str:
        """Why the run broke off; empty if it did not."""
        return self.result.run.failure or ""


@dataclass(frozen=True, slots=True)
class RunTask:
    """One scenario with one relay, to be run on every rank. ``observe``, ``guard`` and ``extra_sinks``, of the
    first ranks, are the caller's; ``make_system`` makes what is measured."""

    resolved: Resolved
    options: Options
    kind: DeviceKind
    observe: ObserverFactory = unobserved
    extra_sinks: Sequence[ExtraSink] = ()
    guard: Guard | None = None
    make_system: MakeSystem = OwnSystem
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    begin: float = field(default_factory=time.perf_counter)

    def without_caller(self) -> RunTask:
        """The task for another process, which has nothing of the caller's."""
        return replace(self, observe=unobserved, extra_sinks=(), guard=None)

    def route(self, clock: Clock, context: RankContext) -> RouterReport:
        """Run the router: serve the workloads that ``PreparedRun`` runs on each worker, each as often as it does."""
        feed, injector = Feed(), context.fault_injector
        warmup = warmup_workload(self.resolved)
        passes = 2 if self.kind == "cuda" and self.options.traced else 1
        workloads = [measured_workload(self.resolved) for _ in range(passes)]
        ended: Sequence[Request] = ()
        failure, start = "", 0
        for workload in workloads if warmup is None else [warmup, *workloads]:
            start = align(context, clock)
            feed.load(workload, start=start)
            if injector is not None and workload is not warmup:
                injector.armed = True
            try:
                assert context.link is not None and context.place is not None
                ended = run_router(feed, context.link, clock, context.place)
            except KeyboardInterrupt:
                ended = feed.give_up(Status.CANCELLED, "interrupted", clock.now())
                break
            except DiedError as death:
                failure = str(death)
                ended = feed.give_up(Status.FAILED, failure, clock.now())
        now = clock.now()
        # The router does not see tokens.
        rows = [request_row(record_of(request, now), start) for request in ended]
        return RouterReport(rows, failure, now)

    def run(self, machine: Machine, sink: GatedSink, context: RankContext) -> RankReport:
        """Run the scenario on one rank. The caller's observer sees the ranks that report requests, each of its sinks
        the rank at its place."""
        options = self.options
        sink.extras += tuple(self.extra_sinks[context.rank : context.rank + 1])
        guard = None if self.guard is None else self.guard.of_rank(context.rank)
        if guard is not None and context.link is not None:
            context = context._replace(link=guard.link(context.link))
        world = None if context.link is None and context.place is None else options.world
        with self._recording(context.rank) as recording:
            if recording is not None:
                sink.extras += (recording,)
            prepared = PreparedRun(
                self.resolved,
                machine,
                sink,
                guard=guard,
                context=context,
                make_system=self.make_system,
            )
            wanted = self.observe if context.reports_requests else unobserved

            @contextmanager
            def observe(clock: Clock, total: int) -> Iterator[Observer]:
                with wanted(clock, total) as own:
                    yield own if recording is None else ObserverGroup(own, recording.observer(clock))

            with broken_on_purpose(self.resolved.relay):
                prepared.warm_up()
                repeat = 1 if world else self._repeat(machine)
                found = measured(prepared, observe, repeat=repeat, traced=options.traced)
            sink.finish(machine.names)
        done = found.done
        if options.adversary is not None:
            found = untimed(found, "an adversary decided when work was done: times mean nothing")
        if machine.untimed:
            found = uncounted(untimed(found, machine.untimed))
        if world == "distributed":
            found = untimed(found, OWN_CLOCKS)
        run = run_part(options.command, self.started, time.perf_counter() - self.begin, done, machine)
        return RankReport(
            result_of(prepared, found, run, world=world, save_tokens=options.save_tokens),
            done.collector.requests.totals,
            None if done.collector.bubble is None else done.collector.bubble.found(),
            done.damage,
            done.end,
        )

    def _repeat(self, machine: Machine) -> int:
        """The number of timed passes: one where times repeat exactly, or mean nothing."""
        untimed = machine.untimed or self.options.adversary is not None
        if not self.options.repeated or machine.labels.exact or untimed:
            return 1
        return self.resolved.scenario.measure.repeat

    def _recording(self, rank: int) -> TimelineRecording | nullcontext[None]:
        """The recording of the rank's timeline, if it is wanted."""
        folder = self.options.record
        if folder is None:
            return nullcontext()
        if rank == 0:  # the result of an earlier run does not belong to the timelines of this one
            (folder / RESULT).unlink(missing_ok=True)
        return TimelineRecording(folder / timeline_file(rank))
