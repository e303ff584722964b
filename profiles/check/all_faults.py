"""Checks every known fault: all checks must pass without it, and one must fail with it, without its name.

A fault that shows in a static batch (``schedbench onebatch``) is checked against the scheduler's own run of the same
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

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
from .report import Check, Document, Evidence, Report, concluded, failed, skipped, verdict

_references: dict[str, Result | Crash] = {}  # of all questions that this process examines


def catch_all(adversaries: Sequence[int], notice: Callable[[str], None]) -> list[Document]:
    """What was found of each fault, in upstream's order, with one worker process per processor. The checks do not get
    the faults' names. ``notice`` is called after each fault."""
    pairs = [(scenario.sound(), scenario) for scenario in fault_scenarios().values()]
    tasks = list(dict.fromkeys(chain.from_iterable(pairs)))
    checks: dict[FaultScenario, tuple[Check, ...]] = {}
    found: list[Document] = []
    with pool(len(tasks)) as each:
        done = zip(tasks, each(partial(_checked, tuple(adversaries)), tasks), strict=True)
        for sound, scenario in pairs:
            while not checks.keys() >= {sound, scenario}:
                task, verdicts = next(done)
                checks[task] = verdicts
            found.append(_document(scenario, checks[sound], checks[scenario]))
            notice(f"{len(found)} of {len(pairs)}: {_words(found[-1])}")
    return found


def _document(scenario: FaultScenario, sound: Sequence[Check], broken: Sequence[Check]) -> Document:
    """``sound`` are the checks without the fault. ``broken`` are those with it, the cheapest first, up to the first
    that fails."""
    fault, question = faults()[scenario.fault], scenario.sound().question()
    loop = "overlapped" if overlaps(question.scenario) else "serial"
    return {
        "name": fault.name,
        "about": fault.about,
        "reference": fault.reference,
        "state": question.relay.state.name,
        "loop": "onebatch" if scenario.onebatch else loop,
        "sound": sound,
        "broken": broken,
        "clean": not failed(sound),
        "caught_by": [check.name for check in failed(broken)],
    }


def _words(fault: Document) -> str:
    by = ", ".join(fault["caught_by"]) or "NOTHING"
    return f"{fault['name']} caught by {by}{'' if fault['clean'] else '; FAILED without it'}"


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


def faults_document(found: Sequence[Document], *, run: Document) -> Document:
    """``found`` is of ``catch_all``."""
    return concluded(
        run,
        passed=all(fault["clean"] and fault["caught_by"] for fault in found),
        faults=found,
        awaited=[
            {"name": fault.name, "reference": fault.reference, "feature": fault.waits_for}
            for fault in awaited_faults().values()
        ],
    )


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
    for row in reference.requests:
        if list(row.token_ids or ()) != list(times.outputs[row.id]):
            yield Evidence(f"request {row.id} got other tokens than the scheduler gives it")
