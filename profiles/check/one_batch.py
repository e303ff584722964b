"""Checks a static batch (``schedbench onebatch``) against the scheduler's own run of the same requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from ...scenarios.workload_schema import Fixed
from ...sched.relay.choice import RelayChoice, choose
from ..platform.resolve import Resolved
from ..ranks.execute import Options
from ..record.result import Result
from ..run.crash import Crash, crash_of
from ..run.declared_hazards import hazards as hazards_of
from ..run.machines import open_machine
from ..run.one_batch import BatchShape, BatchTimes, one_batch, run_batches
from ..run.runner import GatedSink
from .examine import hazards
from .report import Check, Evidence, Report, skipped, verdict
from .runs import attempt_result
from .tokens import SHOWN


def shape_of(resolved: Resolved) -> BatchShape:
    """The scenario's workload as one batch, which its requests of one length are."""
    workload = resolved.scenario.workload
    prompt, output = workload.prompt_tokens, workload.output_tokens
    assert isinstance(prompt, Fixed) and isinstance(output, Fixed) and workload.requests
    return BatchShape(workload.requests, prompt.value, output.value)


def examine_one_batch(resolved: Resolved, relay: RelayChoice) -> Report:
    """``examine`` for a static batch: whether it ends, its tokens, and its hazards."""
    begin = time.perf_counter()
    question = one_batch(resolved, shape_of(resolved))
    checks = tuple(_checks(question, relay))
    return Report(relay, checks, None, time.perf_counter() - begin)


def _checks(question: Resolved, relay: RelayChoice) -> Iterator[Check]:
    try:
        with open_machine("vgpu", question, GatedSink(), hazards=True) as machine:
            [times] = run_batches(question, machine, relay, [shape_of(question)])
            found = hazards_of(machine, (), decoded=True)
    except Exception as error:
        yield Check("run", "failed", "crashed", (Evidence(str(crash_of(error))),))
        yield from (skipped(name, "the run crashed") for name in ("tokens", "hazards"))
        return
    yield Check("run", "passed", f"{times.shape.batch} requests ended")
    yield verdict(
        "tokens", list(_differences(times, _reference(question))), about="as in the serial loop of latest"
    )
    yield hazards(found)


def _reference(question: Resolved) -> Result | Crash:
    options = Options(device="vgpu", save_tokens=True)
    return attempt_result(replace(question, relays=()), choose("latest", {}), options)


def _differences(times: BatchTimes, reference: Result | Crash) -> Iterator[Evidence]:
    if isinstance(reference, Crash):
        yield Evidence(f"the reference crashed: {reference}")
        return
    apart = [row.id for row in reference.requests if list(row.token_ids or ()) != list(times.outputs[row.id])]
    for request in apart[:SHOWN]:
        yield Evidence(f"request {request} got other tokens than the scheduler gives it")
