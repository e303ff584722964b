"""Short ways to run the whole program: in this process, or as the command that a user types."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from schedbench.profiles.check.invariants import Invariants
from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Hazards, Metric, Outputs, Result
from schedbench.profiles.run.document import outputs_of
from schedbench.profiles.run.machines import open_machine
from schedbench.profiles.run.runner import GatedSink, PreparedRun
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer, StepInfo
from schedbench.sched.relay.states import states

# ``mixed`` where the claim does not need its size: a burst, so that steps mix; long outputs, so that decodes outgrow
# a KV pool that held their prompts.
SMALL = (
    "workload.requests=8",
    "workload.arrival=burst",
    "workload.prompt_tokens.max=120",
    "workload.output_tokens={dist: uniform, min: 40, max: 50}",
    "measure.warmup_requests=0",
)
# A pool too small for them, so that requests are retracted.
TIGHT = ("engine.kv_tokens=1280", "engine.schedule_conservativeness=0.01")
# For ``hisparse``: some sequences outgrow a hot buffer of 48 tokens, and some fit into it.
OUTGROWING = (
    "workload.requests=8",
    "workload.arrival=burst",
    "workload.prompt_tokens={dist: uniform, min: 20, max: 120}",
    "workload.output_tokens={dist: uniform, min: 1, max: 30}",
    "measure.warmup_requests=0",
    "engine.chunked_prefill_size=96",
)
# Settings of shipped scenarios whose steps are many or costly: few decodes show all that many show.
SHORTER = dict.fromkeys(
    ("decode_heavy", "dp_idle", "pp2", "pp4_mixed", "throughput"),
    ("workload.output_tokens={dist: uniform, min: 4, max: 16}",),
)


def each_state(*soon: str) -> list[Any]:
    """The states of the relay: those in ``soon`` in ``make test``, all in ``make wide``."""
    return [name if name in soon else pytest.param(name, marks=pytest.mark.wide) for name in states()]


Listener = Callable[[Machine, Scheduler], Observer]
"""Makes an observer that may look into the machine and the scheduler."""


def resolved(scenario: str | Path, *overrides: str) -> Resolved:
    return ask(str(scenario), overrides)


_watching: ContextVar[bool] = ContextVar("watching", default=False)


def watch_runs_of(item: pytest.Item) -> None:
    """Watches every run of a test of ``make wide`` for hazards, and of other tests with ``--watch``."""
    _watching.set(bool(item.config.getoption("--watch") or item.get_closest_marker("wide")))


def result_of(scenario: str | Path, *overrides: str, hazards: bool = False) -> Result:
    """No test's run may break an invariant, or race where it is watched, whatever the test is about."""
    question = resolved(scenario, *overrides)
    return guarded(question, Invariants(), hazards=hazards)


@cache
def known_result(scenario: str, *overrides: str) -> Result:
    """What ``result_of`` returns, from one run for all tests of a process that ask the same."""
    return result_of(scenario, *overrides)


def known_digest(scenario: str, *overrides: str) -> str:
    return digest_of(known_result(scenario, *overrides))


def executed(question: Resolved, **options: Any) -> Result:
    """Runs a question, whatever its run shows."""
    return execute(question, Options(device="vgpu", **options))


def guarded(question: Resolved, guard: Invariants, *, hazards: bool = False) -> Result:
    options = Options(device="vgpu", save_tokens=True, hazards=hazards or _watching.get())
    found = execute(question, options, guard=guard)
    assert not guard.violations()
    assert not found.undeclared, found.hazards
    return found


def hazards_in(result: Result) -> Hazards:
    """What a run that was checked for hazards shows."""
    assert isinstance(result.hazards, Hazards)
    return result.hazards


def digest(scenario: str | Path, *overrides: str) -> str:
    return digest_of(result_of(scenario, *overrides))


def digest_of(result: Result) -> str:
    assert isinstance(result.outputs, Outputs)
    return result.outputs.digest


def value(result: Result, name: str) -> float:
    metric = result.metrics[name]
    assert isinstance(metric, Metric), metric
    return metric.values[0]


def statuses(result: Result) -> set[str]:
    return {request.status for request in result.requests}


def ends(result: Result) -> list[tuple[object, ...]]:
    """How each request ended, with its tokens."""
    return [(row.id, row.status, row.reason, row.token_ids) for row in result.requests]


class InFlight(Observer):
    """Counts the results that are launched and not settled."""

    unsettled = 0

    def launched(self, info: StepInfo) -> None:  # noqa: ARG002
        self.unsettled += 1

    def settled(self, info: StepInfo) -> None:  # noqa: ARG002
        self.unsettled -= 1


def digest_observed(question: Resolved, listener: Listener) -> str:
    """The digest of a run that ``listener`` modifies."""
    with prepared_run(question) as (machine, composed):
        done = composed.measure(lambda *_: nullcontext(listener(machine, composed.scheduler)))
    outputs = outputs_of(done, composed)
    assert isinstance(outputs, Outputs)
    return outputs.digest


@contextmanager
def prepared_run(question: Resolved) -> Iterator[tuple[Machine, PreparedRun]]:
    """A composed scheduler on the virtual GPU, not warmed up."""
    sink = GatedSink()
    opened: AbstractContextManager[Machine] = open_machine("vgpu", question, sink)
    with opened as machine:
        yield machine, PreparedRun(question, machine, sink)


def schedbench(
    *arguments: str | Path, env: dict[str, str] | None = None, ranks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """The command line, as a process of its own, or as so many that torchrun starts."""
    launched = ("torchrun", f"--nproc-per-node={ranks}", "-m", "schedbench")
    return subprocess.run(
        command_line(*arguments, program=("schedbench",) if ranks is None else launched),
        capture_output=True,
        text=True,
        env=plain_environment(env),
        timeout=120,
        check=False,
    )


def command_line(*arguments: str | Path, program: Sequence[str] = ("schedbench",)) -> list[str]:
    """``program``: what is installed beside Python, with its own arguments."""
    return [str(Path(sys.executable).with_name(program[0])), *program[1:], *map(str, arguments)]


def plain_environment(env: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what decides how output is painted."""
    painted = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "TERM")
    return {name: value for name, value in os.environ.items() if name not in painted} | (env or {})
