"""What every rank of a run does, whatever world it is in: its part, measured, as a result."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ...scenarios.combinations import overlaps, staged
from ...scenarios.schema import Scenario
from ...scenarios.workload import Achieved, Lengths
from ...sched.relay.choice import RelayChoice, loop_of
from ...sched.relay.draft_rows import DRAFT_SWITCHES
from ...sched.relay.switches import OVERLAPPED_ONLY
from ..platform.machine import Machine
from ..platform.resolve import Resolved
from ..platform.speculation import speculation
from ..ranks.pairs import WorkerReport
from ..ranks.pipeline import StageReport
from ..record.environment import environment, tool
from ..record.recording import RESULT, TimelineRecording, file_of
from ..record.result import (
    OWN_CLOCKS,
    LengthsPart,
    RelayPart,
    RequestRow,
    Result,
    RunPart,
    ScenarioPart,
    SummaryPart,
    WorkloadPart,
)
from .compose import Guard
from .crash import broken_on_purpose
from .declared_hazards import hazards
from .machines import Kind
from .passes import MeasuredRun, measured, uncounted, untimed
from .rank_context import RankContext
from .runner import GatedSink, Instrument, Pass, PreparedRun, Watch, nobody


@dataclass(frozen=True, slots=True)
class Options:
    """``hazards``: whether to watch for them; it costs time. ``adversary``: number of one that does all work late.
    ``traced``: whether a real device's second, counting pass is run; ``keep_trace``: where its trace is kept."""

    device: Kind = "auto"
    save_tokens: bool = False
    command: str = ""
    hazards: bool = False
    adversary: int | None = None
    world: Literal["virtual", "distributed"] = "virtual"  # of a scenario with several ranks
    traced: bool = True
    keep_trace: Path | None = None
    record: Path | None = None  # folder that gets every rank's timeline


@dataclass(frozen=True, slots=True)
class RunTask:
    """What every rank runs."""

    resolved: Resolved
    relay: RelayChoice
    options: Options
    watch: Watch
    instrument: Instrument | None
    guard: Guard | None
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    begin: float = field(default_factory=time.perf_counter)

    @property
    def around(self) -> tuple[Resolved, bool, int | None]:
        return self.resolved, self.options.hazards, self.options.adversary

    @property
    def unheard(self) -> RunTask:
        """The same for another process, which has none of the caller's listeners."""
        return replace(self, watch=nobody, instrument=None, guard=None)

    def run(self, machine: Machine, gate: GatedSink, rank_context: RankContext) -> StageReport:
        """One rank's run. Only those that tell of requests are watched by the caller's listeners."""
        result, done = self._recorded(machine, gate, rank_context)
        return StageReport(result, done.answers.requests.account, done.answers.bubble.found(), done.end)

    def heard(self, machine: Machine, gate: GatedSink, rank_context: RankContext) -> WorkerReport:
        """The same of a worker that had a part of the requests."""
        result, done = self._recorded(machine, gate, rank_context)
        answers = done.answers
        return WorkerReport(result, answers.requests.account, answers.acceptance, done.damage, done.end)

    def _recorded(self, machine: Machine, gate: GatedSink, rank_context: RankContext) -> tuple[Result, Pass]:
        if rank_context.rank == 0:
            gate.instrument = self.instrument
        if self.options.record is None:
            return self._run(machine, gate, rank_context)
        if rank_context.rank == 0:  # of a run before this one, whose timelines are about to go
            (self.options.record / RESULT).unlink(missing_ok=True)
        with TimelineRecording(self.options.record / file_of(rank_context.rank)) as recording:
            gate.instrument = recording
            return self._run(machine, gate, rank_context)

    def _run(self, machine: Machine, gate: GatedSink, rank_context: RankContext) -> tuple[Result, Pass]:
        options = self.options
        guard = None if self.guard is None else self.guard.of_rank(rank_context.rank)
        bench = PreparedRun(self.resolved, machine, self.relay, gate, guard=guard, rank_context=rank_context)
        with broken_on_purpose(self.relay):
            bench.warm_up()
            found = measured(
                bench,
                machine,
                self.watch if rank_context.tells else nobody,
                save_tokens=options.save_tokens,
                traced=options.traced,
            )
        if options.adversary is not None:
            found = untimed(found, "an adversary decided when work was done: times mean nothing")
        if machine.untimed:
            found = uncounted(untimed(found, machine.untimed))
        world = options.world if rank_context.link is not None else None
        if world == "distributed":
            found = untimed(found, OWN_CLOCKS)
        gate.finish(machine.names)
        run = _run(options, self.started, time.perf_counter() - self.begin, found.done, machine)
        return _result(self.resolved.scenario, self.relay, machine, found, run, world), found.done


def _switches(relay: RelayChoice, scenario: Scenario) -> dict[str, str]:
    """Those that the loop has: with a single stream there is nothing to order, without the overlapped worker none of
    its own."""
    absent = set() if overlaps(scenario) else set(OVERLAPPED_ONLY)
    if speculation(scenario) != "v2":
        absent |= DRAFT_SWITCHES.keys()
    return {name: value for name, value in relay.switches.items() if name not in absent}


# Kinds of steps that read what others have left in the relay.
_HANDED_ON = {"decode", "verify"}


def _known(relay: RelayChoice, scenario: Scenario) -> tuple[str, ...]:
    return relay.known_hazards(
        overlap=overlaps(scenario), speculation=speculation(scenario), staged=staged(scenario)
    )


def _acceptance(scenario: Scenario, done: Pass) -> str | None:
    if speculation(scenario) is None:
        return None
    return "simulated" if done.simulated else "measured"


def _run(options: Options, started: datetime, wall_s: float, done: Pass, machine: Machine) -> RunPart:
    return RunPart(
        id=uuid.uuid4().hex,
        command=options.command,
        started=started.isoformat(timespec="seconds"),
        wall_s=wall_s,
        emulation_speed=(done.end - done.start) / 1e9 / done.wall_s if machine.labels.emulated else None,
        cancelled=done.cancelled,
        failure=done.failure or None,
        hazards_s=None if machine.hazards is None else machine.hazards.spent / 1e9,
    )


def _result(
    scenario: Scenario,
    relay: RelayChoice,
    machine: Machine,
    found: MeasuredRun,
    run: RunPart,
    world: str | None,
) -> Result:
    return Result(
        tool=tool(),
        run=run,
        environment={
            **environment(),
            **machine.environment,
            **({"passes": found.passes} if found.passes else {}),
        },
        labels=machine.labels.model_copy(
            update={"acceptance": _acceptance(scenario, found.done), "world": world}
        ),
        scenario=ScenarioPart(expanded=scenario.expanded(), sha256=scenario.sha256),
        workload=_workload(found.done.achieved),
        relay=RelayPart(
            state=relay.state.name,
            loop=loop_of(overlap=overlaps(scenario), staged=staged(scenario)),
            policies=relay.policies(
                overlap=overlaps(scenario), speculation=speculation(scenario), staged=staged(scenario)
            ),
            switches=_switches(relay, scenario),
            faults=tuple(fault.name for fault in relay.faults),
        ),
        hardware=machine.hardware,
        hazards=hazards(
            machine,
            _known(relay, scenario),
            decoded=bool(_HANDED_ON & found.done.answers.counts.steps.keys()),
        ),
        **{
            **found.parts._asdict(),
            "outputs": found.outputs,
            "requests": _counted_from(found.done.start, found.parts.requests),
        },
    )


def _workload(achieved: Achieved) -> WorkloadPart:
    return WorkloadPart(
        requests=achieved.requests,
        prompt_tokens=_lengths(achieved.prompt_tokens),
        output_tokens=_lengths(achieved.output_tokens),
        clipped=achieved.clipped,
    )


def _lengths(lengths: Lengths) -> LengthsPart:
    requested = lengths.requested
    return LengthsPart(
        requested=SummaryPart(**requested._asdict()) if requested else None,
        achieved=SummaryPart(**lengths.achieved._asdict()),
    )


def _counted_from(start: int, rows: tuple[RequestRow, ...]) -> tuple[RequestRow, ...]:
    """Instants from the start of the measured workload on."""
    return tuple(
        row.model_copy(
            update={
                name: value - start
                for name in ("arrival", "first_token", "finish")
                if (value := getattr(row, name)) is not None
            }
        )
        for row in rows
    )
