"""One scenario, one relay, one result document."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from ...scenarios.combinations import overlaps, routed, staged
from ...scenarios.failures import rank_names
from ...scenarios.problems import ScenarioError
from ...scenarios.schema import Scenario
from ...scenarios.workload import Achieved, Lengths
from ...sched.relay.draft_rows import DRAFT_SWITCHES
from ...sched.relay.states import RelayChoice, loop_of
from ...sched.relay.switches import OVERLAPPED_ONLY
from ..budget import Breach, breaches, untested
from ..environment import environment, tool
from ..hazards import hazards
from ..recording import Recording, file_of
from ..result import (
    Hazards,
    LengthsPart,
    RelayPart,
    RequestRow,
    Result,
    Run,
    ScenarioPart,
    SummaryPart,
    WorkloadPart,
)
from ..world.audience import Audience
from ..world.carriers import require_nixl
from ..world.data_parallel import DATA_PARALLEL
from ..world.pairs import Heard
from ..world.processes import process_world
from ..world.ranks import PIPELINE, RankRun, Ranks, alone, virtual_world
from ..world.routed import Workers, routed_world
from .compose import Guard
from .crash import broken_on_purpose
from .draft import speculation
from .machine import Machine, MachineError
from .machines import Kind, chosen
from .passes import Measured, measured, uncounted, untimed
from .resolve import Resolved
from .runner import Bench, Instrument, Pass, Valve, Watch, nobody
from .seat import Seat


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result, what it broke of the scenario's budget, and the kinds in the budget that no step had."""

    result: Result
    breaches: tuple[Breach, ...]
    untested: tuple[str, ...]

    @property
    def undeclared(self) -> bool:
        """Whether the run showed a hazard that its relay state does not declare."""
        return isinstance(self.result.hazards, Hazards) and bool(self.result.hazards.findings)


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


def execute(
    resolved: Resolved,
    relay: RelayChoice,
    options: Options,
    *,
    watch: Watch = nobody,
    instrument: Instrument | None = None,
    guard: Guard | None = None,
) -> Outcome:
    """Run once. Raises MachineError, CheckpointError, ScenarioError, TraceError; BrokenRunError where the relay's
    faults broke it."""
    task = _Task(resolved, relay, options, watch, instrument, guard)
    scenario, kind = resolved.scenario, chosen(options.device, resolved.scenario)
    if scenario.engine.ranks == 1 and not routed(scenario):
        result = alone(kind, *task.around, task.run, keep_trace=options.keep_trace)
    else:
        result = (_here if options.world == "virtual" else _apart)(task)
    return Outcome(result, tuple(breaches(scenario.expect, result)), tuple(untested(scenario.expect, result)))


def _here(task: _Task) -> Result:
    """Ranks that are threads of this process, in virtual time."""
    engine, everybody = task.resolved.scenario.engine, replace(task, watch=Audience(task.watch))
    if engine.disaggregation.transfer == "nixl":
        raise MachineError(
            "engine.disaggregation.transfer: nixl moves KV between processes: --world distributed"
        )
    if routed(task.resolved.scenario):
        return routed_world(*task.around, everybody.heard)
    if task.options.device == "cuda":
        raise MachineError("a virtual world has virtual GPUs; --world distributed puts ranks on real ones")
    if engine.data_parallel.ranks > 1:
        return virtual_world(*task.around, everybody.heard, DATA_PARALLEL)
    return virtual_world(*task.around, task.run, PIPELINE)


def _apart(task: _Task) -> Result:
    """Ranks that are processes of their own."""
    scenario, own = task.resolved.scenario, (task, task.unheard)
    _only_deaths(scenario)
    if routed(scenario):
        _only_far(scenario)
        passes = 2 if torch.cuda.is_available() and task.options.traced else 1
        return process_world(*(Workers(*each.around, each.heard, passes) for each in own))
    if scenario.engine.data_parallel.ranks > 1:
        return process_world(*(Ranks(*each.around, each.heard, DATA_PARALLEL) for each in own))
    return process_world(*(Ranks(*each.around, each.run, PIPELINE) for each in own))


def _only_far(scenario: Scenario) -> None:
    """Ways of KV that processes have."""
    pair = scenario.engine.disaggregation
    if pair.transfer == "nixl":
        require_nixl()
    if pair.mode != "none" and pair.transfer == "local":
        raise MachineError(
            "engine.disaggregation.transfer: local stays within one process, and --world distributed has several"
        )


def _only_deaths(scenario: Scenario) -> None:
    """What can befall processes by script: one can kill itself, but for that which tells how the run ended."""
    problems = [
        scenario.source.problem(("faults", place), "with --world distributed ranks die; their links are real")
        for place, failure in enumerate(scenario.faults)
        if failure.link
    ]
    problems += [
        scenario.source.problem(
            ("faults", place), f"with --world distributed {failure.rank} is the command itself"
        )
        for place, failure in enumerate(scenario.faults)
        if failure.rank == rank_names(scenario)[0]
    ]
    if problems:
        raise ScenarioError(problems)


@dataclass(frozen=True, slots=True)
class _Task:
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
    def unheard(self) -> _Task:
        """The same for another process, which has none of the caller's listeners."""
        return replace(self, watch=nobody, instrument=None, guard=None)

    def run(self, machine: Machine, valve: Valve, seat: Seat) -> RankRun:
        """One rank's run. Only those that tell of requests are watched by the caller's listeners."""
        result, done = self._recorded(machine, valve, seat)
        return RankRun(result, done.answers.bubble.found(), done.end)

    def heard(self, machine: Machine, valve: Valve, seat: Seat) -> Heard:
        """The same of a worker that had a part of the requests."""
        result, done = self._recorded(machine, valve, seat)
        answers = done.answers
        return Heard(result, answers.requests.account, answers.acceptance, done.damage, done.end)

    def _recorded(self, machine: Machine, valve: Valve, seat: Seat) -> tuple[Result, Pass]:
        if seat.rank == 0:
            valve.instrument = self.instrument
        if self.options.record is None:
            return self._run(machine, valve, seat)
        with Recording(self.options.record / file_of(seat.rank)) as recording:
            valve.instrument = recording
            return self._run(machine, valve, seat)

    def _run(self, machine: Machine, valve: Valve, seat: Seat) -> tuple[Result, Pass]:
        options = self.options
        guard = None if self.guard is None else self.guard.of_rank(seat.rank)
        bench = Bench(self.resolved, machine, self.relay, valve, guard=guard, seat=seat)
        with broken_on_purpose(self.relay):
            bench.warm_up()
            found = measured(
                bench,
                machine,
                self.watch if seat.tells else nobody,
                save_tokens=options.save_tokens,
                traced=options.traced,
            )
        if options.adversary is not None:
            found = untimed(found, "an adversary decided when work was done: times mean nothing")
        if machine.untimed:
            found = uncounted(untimed(found, machine.untimed))
        if options.world == "distributed" and seat.link is not None:
            found = untimed(found, "the ranks' clocks are their own: no link was emulated")
        valve.finish(machine.names)
        run = _run(options, self.started, time.perf_counter() - self.begin, found.done, machine)
        return _result(self.resolved.scenario, self.relay, machine, found, run), found.done


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


def _run(options: Options, started: datetime, wall_s: float, done: Pass, machine: Machine) -> Run:
    return Run(
        id=uuid.uuid4().hex,
        command=options.command,
        started=started.isoformat(timespec="seconds"),
        wall_s=wall_s,
        emulation_speed=(done.end - done.start) / 1e9 / done.wall_s if machine.labels.emulated else None,
        cancelled=done.cancelled,
        failure=done.failure or None,
        hazards_s=None if machine.hazards is None else machine.hazards.spent / 1e9,
    )


def _result(scenario: Scenario, relay: RelayChoice, machine: Machine, found: Measured, run: Run) -> Result:
    return Result(
        tool=tool(),
        run=run,
        environment={
            **environment(),
            **machine.environment,
            **({"passes": found.passes} if found.passes else {}),
        },
        labels=machine.labels.model_copy(update={"acceptance": _acceptance(scenario, found.done)}),
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
