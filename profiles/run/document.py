"""The result document of one rank, and what was measured for it: in one pass or, where times are measured, in several
and, where counting perturbs times, in timed ones and a traced one, never pooled."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from ..measure.achieved import decode_load, decode_metrics, prompt_load, prompt_metrics
from ..measure.collector import ResultParts
from ..measure.metrics import Metrics, of_passes
from ..measure.requests import RequestRecord
from ..platform.machine import Machine
from ..platform.resolve import speculation, speculation_depth
from ..record.environment import environment, tool
from ..record.provenance import RunPart, ScenarioPart
from ..record.result import Abstained, Outputs, RequestRow, Result, digest
from .declared_hazards import hazards
from .runner import ObserverFactory, Pass, PreparedRun, unobserved

_METRICS_WITHOUT_TIMES = ("accept_length", "position_acceptance")


class MeasuredRun(NamedTuple):
    """``done`` is the last timed pass, which requests are of; ``passes`` says which passes each number is from."""

    done: Pass
    parts: ResultParts
    outputs: Outputs | Abstained
    passes: dict[str, Any]


def measured(
    prepared: PreparedRun, observe: ObserverFactory, *, repeat: int = 1, traced: bool = True
) -> MeasuredRun:
    """Run the workload ``repeat`` times and, where counting needs a pass of its own and is wanted, once more,
    ``traced``. Metrics are of all timed passes, everything else is of the last one."""
    machine = prepared.machine
    found = _timed(prepared, observe, repeat)
    if machine.traced is None:
        return found
    done, parts, outputs, passes = found
    if not traced or done.cancelled:
        why = "the run was interrupted" if traced else "another tool counts"
        return uncounted(found._replace(passes=passes | _passes(abstained=why)))
    prepared.system.forget()
    with machine.traced() as counting:
        again = prepared.measure(unobserved)
    counted = again.collector.finish(machine.names)
    length = done.end - done.start
    void = "the traced pass was interrupted" if again.cancelled else counting.abstained
    return MeasuredRun(
        done,
        parts._replace(per_step=counted.per_step, copies=counted.copies, syncs=counted.syncs),
        agreed(outputs, outputs_of(again, prepared)),
        passes
        | _passes(
            trace_overhead=(again.end - again.start) / length if length else None,
            **counting.notes,
            **({"abstained": void} if void else {}),
        ),
    )


def _timed(prepared: PreparedRun, observe: ObserverFactory, repeat: int) -> MeasuredRun:
    """Run the workload ``repeat`` times from an empty engine, or up to an interruption or a pass that breaks off. The
    metrics of such a pass count only where there is no whole one before it."""
    machine = prepared.machine
    drafts = speculation_depth(prepared.resolved.scenario)
    metrics: list[Metrics] = []
    done: Pass | None = None
    outputs: Outputs | Abstained | None = None
    whole = 0
    for _ in range(repeat):
        try:
            if whole:
                prepared.system.forget()
            last = prepared.measure(observe)
            found = last.collector.finish(machine.names, drafts=drafts)
        except KeyboardInterrupt:  # between two passes
            if done is None:
                raise
            done, outputs = replace(done, cancelled=True), Abstained(abstained="the run was interrupted")
            break
        done, parts = last, found
        ended = outputs_of(done, prepared)
        if outputs is None or isinstance(ended, Abstained):
            outputs = ended
        elif outputs != ended:
            outputs = Abstained(abstained="the timed passes gave different tokens")
        partial = done.cancelled or bool(done.failure)
        if not (partial and whole):
            metrics.append(parts.metrics | _achieved(prepared, done))
        if partial:
            break
        whole += 1
    assert done is not None and outputs is not None
    passes = {"timed": whole} if repeat > 1 else {}
    return MeasuredRun(done, parts._replace(metrics=of_passes(metrics)), outputs, passes)


def _achieved(prepared: PreparedRun, done: Pass) -> Metrics:
    """Rates that forwards achieved; none where a forward is not the whole decoder's, one at a time."""
    model, scenario = prepared.resolved.model, prepared.resolved.scenario
    other = model.indexer is not None or model.cross_layers or scenario.engine.block_diffusion.enabled
    if prepared.context.link is not None or speculation_depth(scenario) or other:
        return {}
    waiting, account = done.collector.waiting, done.collector.requests.totals
    mixed = "mixed with decodes" if "mixed" in waiting.forwards else ""
    again = "some were computed twice" if account.retractions else ""
    scored = "their log probabilities were computed, too" if account.scores_prompts else ""
    decodes = decode_metrics(
        decode_load(model),
        prepared.resolved.hardware,
        account.records,
        spans=waiting.forwards["decode"],
        requests=waiting.requests["decode"],
    )
    prompts = prompt_metrics(
        prompt_load(model),
        account.records,
        spans=waiting.forwards["prefill"],
        logits=not scenario.engine.embedding,
        why_not=mixed or again or scored,
    )
    return decodes | prompts


def outputs_of(done: Pass, prepared: PreparedRun) -> Outputs | Abstained:
    """The digest of the run's tokens. The sum of a request's damaged KV tags enters it as one more token."""
    if done.cancelled:
        return Abstained(abstained="the run was interrupted")
    if done.failure:
        return Abstained(abstained=f"the run broke off: {done.failure}")
    if done.simulated:
        return Abstained(abstained="the acceptance of drafts was simulated, the tokens mean nothing")
    records = done.collector.requests.totals.in_order()
    return outputs_with(records, done.damage, emulated=prepared.machine.labels.emulated)


def outputs_with(records: Sequence[RequestRecord], damage: Mapping[str, int], *, emulated: bool) -> Outputs:
    """The digest of requests that ended: their tokens or embeddings, the damage to their KV tags and, of an emulated
    run, the log probabilities that they asked for. On a GPU log probabilities depend on the batches."""

    def values(record: RequestRecord) -> list[float]:
        logprobs = record.logprobs if emulated else ()
        damaged = [damage[record.id]] if record.id in damage else []
        return [*record.output_ids, *record.embedding, *logprobs, *damaged]

    return Outputs(digest=digest((record.id, values(record)) for record in records))


def agreed(timed: Outputs | Abstained, traced: Outputs | Abstained) -> Outputs | Abstained:
    """The digest that both passes have. With different tokens, counts and times are of different runs."""
    if timed == traced:
        return timed
    if isinstance(traced, Abstained):
        return Abstained(abstained=f"traced pass: {traced.abstained}")
    return Abstained(abstained="the timed and the traced pass gave different tokens")


def untimed(found: MeasuredRun, why: str) -> MeasuredRun:
    """Keep tokens and counts; everything that is a time, or follows from one, abstains."""
    metrics: Metrics = {
        name: metric if name.startswith(_METRICS_WITHOUT_TIMES) else Abstained(abstained=why)
        for name, metric in found.parts.metrics.items()
    }
    parts = found.parts._replace(metrics=metrics, idle=Abstained(abstained=why), copies=(), syncs=())
    return found._replace(parts=parts)


def uncounted(found: MeasuredRun) -> MeasuredRun:
    """Without anything that is counted per step."""
    return found._replace(parts=found.parts._replace(per_step={}, copies=(), syncs=()))


def _passes(**facts: Any) -> dict[str, Any]:
    return {"times": "timed pass", "counts": "traced pass", **facts}


# Kinds of steps that read what earlier steps have left in the relay.
_KINDS_THAT_READ_THE_RELAY: Final = {"decode", "verify"}


def result_of(
    prepared: PreparedRun, found: MeasuredRun, run: RunPart, *, world: str | None, save_tokens: bool
) -> Result:
    """``world``: in which several ranks ran; None for a single engine."""
    scenario, system, machine = prepared.resolved.scenario, prepared.system, prepared.machine
    done, acceptance = found.done, None
    if speculation(scenario) is not None:
        acceptance = "simulated" if done.simulated else "measured"
    return Result(
        tool=tool(),
        run=run,
        environment={
            **environment(),
            **machine.environment,
            **({"passes": found.passes} if found.passes else {}),
        },
        labels=machine.labels.model_copy(update={"acceptance": acceptance, "world": world}),
        scenario=ScenarioPart(expanded=scenario.expanded(), sha256=scenario.sha256),
        workload=done.achieved,
        relay=system.relay_part(),
        hardware=machine.hardware,
        hazards=hazards(
            machine,
            system.declared_hazards,
            decoded=bool(_KINDS_THAT_READ_THE_RELAY & done.collector.periods.kinds),
        ),
        ordering=() if machine.hazards is None else machine.hazards.places(),
        requests=tuple(
            request_row(record, done.start, save_tokens=save_tokens)
            for record in done.collector.requests.totals.in_order()
        ),
        outputs=found.outputs,
        **found.parts._asdict(),
    )


def run_part(command: str, started: datetime, wall_s: float, done: Pass, machine: Machine) -> RunPart:
    return RunPart(
        id=uuid.uuid4().hex,
        command=command,
        started=started.isoformat(timespec="seconds"),
        wall_s=wall_s,
        emulation_speed=(done.end - done.start) / 1e9 / done.wall_s if machine.labels.emulated else None,
        cancelled=done.cancelled,
        failure=done.failure or None,
        missed=tuple(done.missed),
        hazards_s=None if machine.hazards is None else machine.hazards.spent / 1e9,
    )


def request_row(record: RequestRecord, start: int, *, save_tokens: bool = False) -> RequestRow:
    """Instants of the row count from ``start``, that of the measured workload."""
    instants = {name: getattr(record, name) for name in ("arrival", "first_token", "finish")}
    changes = {name: value - start for name, value in instants.items() if value is not None}
    kept = {"token_ids": tuple(record.output_ids)} if save_tokens else {}
    row = RequestRow.model_validate(record, from_attributes=True)
    return row.model_copy(update={**changes, "kept_logprobs": record.logprobs, **kept})
