"""One scenario, one relay, one result document."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...scenarios.combinations import routed
from ...scenarios.failures import rank_names
from ...scenarios.problems import ScenarioError
from ...scenarios.schema import Scenario
from ...sched.relay.choice import RelayChoice
from ..measure.budget import Breach, breaches, untested
from ..platform import capacity
from ..platform.machine import MachineError
from ..platform.resolve import Resolved
from ..record.result import Hazards, Result
from ..run.compose import Guard
from ..run.machines import chosen
from ..run.runner import Instrument, Watch, nobody
from ..run.task import Options, RunTask
from .carriers import require_nixl
from .data_parallel import DATA_PARALLEL
from .pipeline import PIPELINE
from .processes import launched, process_world
from .ranks import Ranks, alone, virtual_world
from .routed import Workers, routed_world
from .shared_watch import SharedWatch


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A result, what it broke of the scenario's budget, and the kinds in the budget that no step had."""

    result: Result
    breaches: tuple[Breach, ...]
    untested: tuple[str, ...]

    @property
    def undeclared(self) -> bool:
        """Whether the run showed a hazard that its relay state does not declare."""
        return isinstance(self.result.hazards, Hazards) and bool(self.result.hazards.findings)


def execute(
    resolved: Resolved,
    relay: RelayChoice,
    options: Options,
    *,
    watch: Watch = nobody,
    instrument: Instrument | None = None,
    guard: Guard | None = None,
) -> RunOutcome:
    """Run once. Raises MachineError, CheckpointError, ScenarioError, TraceError; BrokenRunError where the relay's
    faults broke it."""
    task = RunTask(resolved, relay, options, watch, instrument, guard)
    scenario, kind = resolved.scenario, chosen(options.device, resolved.scenario)
    if scenario.engine.ranks == 1 and not routed(scenario):
        result = alone(kind, *task.around, task.run, keep_trace=options.keep_trace)
    else:
        result = (_here if options.world == "virtual" else _apart)(task)
    return RunOutcome(
        result, tuple(breaches(scenario.expect, result)), tuple(untested(scenario.expect, result))
    )


def _here(task: RunTask) -> Result:
    """Ranks that are threads of this process, in virtual time."""
    engine, everybody = task.resolved.scenario.engine, replace(task, watch=SharedWatch(task.watch))
    if engine.disaggregation.transfer == "nixl":
        raise MachineError(
            "engine.disaggregation.transfer: nixl moves KV between processes: --world distributed"
        )
    if task.options.device == "cuda":
        raise MachineError("a virtual world has virtual GPUs; --world distributed puts ranks on real ones")
    if routed(task.resolved.scenario):
        return routed_world(*task.around, everybody.heard)
    if engine.data_parallel.ranks > 1:
        return virtual_world(*task.around, everybody.heard, DATA_PARALLEL)
    return virtual_world(*task.around, task.run, PIPELINE)


def _apart(task: RunTask) -> Result:
    """Ranks that are processes of their own."""
    scenario, own = task.resolved.scenario, (task, task.unheard)
    kind = chosen(task.options.device, scenario)
    _only_deaths(scenario)
    if launched() is None and kind == "vgpu":
        capacity.check_world(task.resolved)
    if routed(scenario):
        _only_far(scenario)
        passes = 2 if kind == "cuda" and task.options.traced else 1
        return process_world(*(Workers(kind, *each.around, each.heard, passes) for each in own))
    if scenario.engine.data_parallel.ranks > 1:
        return process_world(*(Ranks(kind, *each.around, each.heard, DATA_PARALLEL) for each in own))
    return process_world(*(Ranks(kind, *each.around, each.run, PIPELINE) for each in own))


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
            ("faults", place),
            f"with --world distributed {failure.rank} is the command itself:"
            " let another rank die, or use --world virtual",
        )
        for place, failure in enumerate(scenario.faults)
        if failure.rank == rank_names(scenario)[0]
    ]
    if problems:
        raise ScenarioError(problems)


__all__ = ["Options", "RunOutcome", "execute"]
