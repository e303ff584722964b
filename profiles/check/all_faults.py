"""Checks every known fault: all checks must pass without it, and one must fail with it, without its name.

A fault that shows in a static batch (``schedbench onebatch``) is checked against the scheduler's own run of the same
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from ...scenarios.combinations import overlaps
from ...scenarios.workload_schema import Fixed
from ...sched.relay.faults import awaited_faults, faults
from ..platform.pool import pool
from ..platform.resolve import Resolved
from ..record.result import Result
from ..run.crash import Crash, crash_of
from ..run.declared_hazards import hazards as hazards_of
from ..run.machines import Options, open_machine
from ..run.one_batch import BatchShape, BatchTimes, one_batch, run_batches
from ..run.runner import GatedSink
from . import tokens
from .examine import Examiner, hazards
from .faults import FaultScenario, fault_scenarios
from .report import SHOWN, Check, Document, Evidence, Report, concluded, failed, skipped, verdict


class FaultVerdict(NamedTuple):
    """The checks of a question without the fault; and with it, the cheapest first, up to the first that fails."""

    scenario: FaultScenario
    sound: tuple[Check, ...]
    broken: tuple[Check, ...]

    @property
    def clean(self) -> bool:
        return not failed(self.sound)

    @property
    def by(self) -> tuple[Check, ...]:
        return failed(self.broken)

    @property
    def passed(self) -> bool:
        return self.clean and bool(self.by)


_references: dict[str, Result | Crash] = {}  # of all questions that this process examines


def catch_all(adversaries: Sequence[int], notice: Callable[[str], None]) -> list[FaultVerdict]:
    """Verdicts in upstream's order, with one worker process per processor. The checks do not get the faults' names.
    ``notice`` is called after each fault."""
    chosen = fault_scenarios()
    pairs = [(scenario.sound(), scenario) for scenario in chosen.values()]
    tasks = list(dict.fromkeys(chain.from_iterable(pairs)))
    checks: dict[FaultScenario, tuple[Check, ...]] = {}
    found: list[FaultVerdict] = []
    with pool(len(tasks)) as each:
        done = zip(tasks, each(partial(_checked, tuple(adversaries)), tasks), strict=True)
        for sound, scenario in pairs:
            while not checks.keys() >= {sound, scenario}:
                task, verdicts = next(done)
                checks[task] = verdicts
            found.append(FaultVerdict(scenario, checks[sound], checks[scenario]))
            notice(f"{len(found)} of {len(chosen)}: {_words(found[-1])}")
    return found


def _words(caught: FaultVerdict) -> str:
    by = ", ".join(check.name for check in caught.by) or "NOTHING"
    return f"{caught.scenario.fault} caught by {by}{'' if caught.clean else '; FAILED without it'}"


def _checked(adversaries: Sequence[int], task: FaultScenario) -> tuple[Check, ...]:
    question = task.question()
    if task.onebatch:
        return tuple(examine_one_batch(question).checks)
    checks = []
    for check in Examiner(question, adversaries, references=_references).checks(question.relay):
        checks.append(check)
        if task.fault and check.verdict == "failed":
            break
    return tuple(checks)


def faults_document(found: Sequence[FaultVerdict], *, run: Document) -> Document:
    return concluded(
        run,
        passed=all(caught.passed for caught in found),
        faults=[_document(caught) for caught in found],
        awaited=[
            {"name": fault.name, "reference": fault.reference, "feature": fault.feature}
            for fault in awaited_faults().values()
        ],
    )


def _document(caught: FaultVerdict) -> Document:
    fault, question = faults()[caught.scenario.fault], caught.scenario.sound().question()
    loop = "overlapped" if overlaps(question.scenario) else "serial"
    return {
        "name": fault.name,
        "about": fault.about,
        "reference": fault.reference,
        "state": question.relay.state.name,
        "loop": "onebatch" if caught.scenario.onebatch else loop,
        "sound": caught.sound,
        "broken": caught.broken,
        "clean": caught.clean,
        "caught_by": [check.name for check in caught.by],
    }


# ---- a static batch ---------------------------------------------------------------------------------------------


def shape_of(resolved: Resolved) -> BatchShape:
    """The scenario's workload as one batch, which its requests of one length are."""
    workload = resolved.scenario.workload
    prompt, output = workload.prompt_tokens, workload.output_tokens
    assert isinstance(prompt, Fixed) and isinstance(output, Fixed) and workload.requests
    return BatchShape(workload.requests, prompt.value, output.value)


def examine_one_batch(resolved: Resolved) -> Report:
    """``examine`` for a static batch: whether it ends, its tokens, and its hazards."""
    question = one_batch(resolved, shape_of(resolved))
    return Report(question.relay, checks=list(_checks(question)))


def _checks(question: Resolved) -> Iterator[Check]:
    try:
        with open_machine("vgpu", question, GatedSink(), Options(hazards=True)) as machine:
            [times] = run_batches(question, machine, [shape_of(question)])
            found = hazards_of(machine, (), decoded=True)
    except Exception as error:
        yield Check("run", "failed", "crashed", (Evidence(str(crash_of(error))),))
        yield from (skipped(name, "the run crashed") for name in ("tokens", "hazards"))
        return
    yield Check("run", "passed", f"{times.shape.batch} requests ended")
    yield verdict(
        "tokens",
        list(_differences(times, tokens.reference(question))),
        about="as in the serial loop of latest",
    )
    yield hazards(found)


def _differences(times: BatchTimes, reference: Result | Crash) -> Iterator[Evidence]:
    if isinstance(reference, Crash):
        yield Evidence(f"the reference crashed: {reference}")
        return
    apart = [row.id for row in reference.requests if list(row.token_ids or ()) != list(times.outputs[row.id])]
    for request in apart[:SHOWN]:
        yield Evidence(f"request {request} got other tokens than the scheduler gives it")
