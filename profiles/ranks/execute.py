"""One scenario, one relay, one result document. What only some runs need is imported by those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ...scenarios.combinations import MODES, findings
from ...scenarios.failures import words
from ...scenarios.schema import Scenario
from ..measure.budget import asked
from ..measure.metrics import exact
from ..platform.inputs import scenario_part
from ..platform.own_process import between_runs
from ..platform.resolve import Resolved
from ..record.result import Result
from ..run.compose import Guard
from ..run.machines import Options, device_kind
from ..run.runner import ExtraSink, ObserverFactory, unobserved
from ..run.task import RunTask
from .contexts import rank_contexts
from .join import join
from .threads import run_alone, run_threads

_MODEL_RUNNER: Final = ("engine", "model_runner")


def execute(
    resolved: Resolved,
    options: Options,
    *,
    observe: ObserverFactory = unobserved,
    extra_sinks: Sequence[ExtraSink] = (),
    guard: Guard | None = None,
) -> Result:
    """Run once. ``observe`` and ``guard`` see our own scheduler only. Raises MachineError, CheckpointError,
    ScenarioError, TraceError; BrokenRunError where the relay's faults broke it; EngineError and EngineFailedError of an
    engine of another project."""
    between_runs()
    scenario = scenario_part(resolved)  # before the run, which may outlast an edit
    if resolved.engine is not None:
        from ..engines.client import require_freed, run_engine

        contexts = rank_contexts(resolved)
        reports = run_engine(resolved.engine, resolved, options, contexts, extra_sinks)
        result = join(resolved, contexts, reports, ())
    else:
        _require_own(resolved.scenario)
        kind = device_kind(options.device, resolved.scenario)
        result = _own(RunTask(resolved, options, kind, observe, extra_sinks, guard))
    parts: dict[str, Any] = {"scenario": scenario, "not_asked": asked(result).not_asked}
    if result.labels.exact:
        marked = (rank.model_copy(update={"metrics": exact(rank.metrics)}) for rank in result.ranks)
        parts |= {"metrics": exact(result.metrics), "ranks": tuple(marked)}
    result = result.model_copy(update=parts)
    if resolved.engine is not None:
        require_freed(resolved.engine, result)
    return result


def whole(result: Result) -> Result:
    """The result. Raises KeyboardInterrupt where the user interrupted its run, of which it is only a part."""
    if result.run.cancelled:
        raise KeyboardInterrupt
    return result


def _require_own(scenario: Scenario) -> None:
    """Raises ScenarioError for what only engines of other projects run."""
    if MODES["own model runner"].on(scenario):
        problem = "own is the model runner of another project's engine: name one with --engine"
        raise scenario.source.refuse(_MODEL_RUNNER, problem)
    overridden = scenario.source.overridden
    for key, problem in findings(scenario, verdict="engines", overridden=overridden):
        raise scenario.source.refuse(key, problem)


def _own(task: RunTask) -> Result:
    """The result of schedbench's own scheduler, on all ranks."""
    contexts = rank_contexts(task.resolved)
    missed = tuple(map(words, task.resolved.scenario.faults))  # of processes: none is left where a rank dies
    if len(contexts) == 1:
        reports = [run_alone(task)]
    elif task.options.world == "virtual":
        reports, missed = run_threads(task, contexts)
    else:
        from .processes import run_processes

        reports = run_processes(task, contexts)
    return join(task.resolved, contexts, reports, missed)


__all__ = ["Options", "execute", "whole"]
