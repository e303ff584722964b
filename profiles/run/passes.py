"""What a run is measured by: one pass or, where counting perturbs times, a timed and a traced one, never pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..measure.achieved import decode_load, decode_metrics, prompt_load, prompt_metrics
from ..measure.collector import Metrics, ResultParts
from ..measure.requests import RequestRecord
from ..platform.machine import Counting, Machine
from ..platform.speculation import speculation_depth
from ..record.result import Abstained, Outputs, digest
from .runner import Pass, PreparedRun, Watch, nobody

_UNTIMED = ("accept_length", "position_acceptance")


class MeasuredRun(NamedTuple):
    """``done`` is the pass whose times and requests are told; ``passes`` says where each number is from."""

    done: Pass
    parts: ResultParts
    outputs: Outputs | Abstained
    passes: dict[str, Any]


def measured(
    bench: PreparedRun, machine: Machine, watch: Watch, *, save_tokens: bool, traced: bool = True
) -> MeasuredRun:
    """Run the scenario's workload; once more, ``traced``, on a machine that counts only then."""
    done = bench.measure(watch)
    drafts = speculation_depth(bench.scenario)
    parts = done.answers.finish(machine.names, exact=machine.exact, drafts=drafts, save_tokens=save_tokens)
    parts = parts._replace(metrics=parts.metrics | _achieved(bench, done))
    outputs = outputs_of(done)
    if machine.traced is None:
        return MeasuredRun(done, parts, outputs, {})
    if not traced:
        return MeasuredRun(done, _uncounted(parts), outputs, _told(abstained="another tool counts"))
    if done.cancelled:
        return MeasuredRun(done, _uncounted(parts), outputs, _told(abstained="the run was interrupted"))
    bench.forget()
    with machine.traced() as counting:
        again = bench.measure(nobody)
    counted = again.answers.finish(machine.names, exact=machine.exact)
    return MeasuredRun(
        done,
        _counted(parts, counted),
        agreed(outputs, outputs_of(again)),
        _told(**_facts(done, again, counting)),
    )


def _achieved(bench: PreparedRun, done: Pass) -> Metrics:
    """What its forwards did in a second; nothing of those that are not the whole decoder's, one at a time."""
    model = bench.resolved.model
    if bench.rank_context.link is not None or speculation_depth(bench.scenario) or model.indexer is not None:
        return {}
    waiting, account = done.answers.waiting, done.answers.requests.account
    exact, mixed = bench.machine.exact, "mixed with decodes" if "mixed" in waiting.forwards else ""
    again = "some were computed twice" if account.retractions else ""
    decodes = decode_metrics(
        decode_load(model),
        bench.resolved.hardware,
        account.records,
        spans=waiting.forwards["decode"],
        requests=waiting.requests["decode"],
        exact=exact,
    )
    prompts = prompt_metrics(
        prompt_load(model),
        account.records,
        spans=waiting.forwards["prefill"],
        why_not=mixed or again,
        exact=exact,
    )
    return decodes | prompts


def outputs_of(done: Pass) -> Outputs | Abstained:
    """What a damaged KV slot added up to enters the digest as one more token."""
    if done.cancelled:
        return Abstained(abstained="the run was interrupted")
    if done.failure:
        return Abstained(abstained=f"the run broke off: {done.failure}")
    if done.simulated:
        return Abstained(abstained="drafts were accepted by lot, the tokens mean nothing")
    return outputs_with(done.answers.requests.account.in_order(), done.damage)


def outputs_with(records: Sequence[RequestRecord], damage: Mapping[str, int]) -> Outputs:
    """The digest of requests that ended, and of the damage that was found in them."""
    return Outputs(
        digest=digest(
            (record.id, [*record.output_ids, *([damage[record.id]] if record.id in damage else [])])
            for record in records
        )
    )


def agreed(timed: Outputs | Abstained, traced: Outputs | Abstained) -> Outputs | Abstained:
    """The passes' common digest. Different tokens mean that counts and times are of different runs."""
    if timed == traced:
        return timed
    if isinstance(traced, Abstained):
        return Abstained(abstained=f"traced pass: {traced.abstained}")
    return Abstained(abstained="the timed and the traced pass gave different tokens")


def untimed(found: MeasuredRun, why: str) -> MeasuredRun:
    """Tokens and counts stay; whatever is a time, or follows from one, abstains."""
    metrics: Metrics = {
        name: metric if name.startswith(_UNTIMED) else Abstained(abstained=why)
        for name, metric in found.parts.metrics.items()
    }
    parts = found.parts._replace(metrics=metrics, idle=Abstained(abstained=why), copies=(), syncs=())
    return found._replace(parts=parts)


def uncounted(found: MeasuredRun) -> MeasuredRun:
    """Nobody looked at what steps did."""
    return found._replace(parts=_uncounted(found.parts))


def _uncounted(parts: ResultParts) -> ResultParts:
    return parts._replace(per_step={}, copies=(), syncs=())


def _counted(timed: ResultParts, traced: ResultParts) -> ResultParts:
    return timed._replace(per_step=traced.per_step, copies=traced.copies, syncs=traced.syncs)


def _facts(done: Pass, again: Pass, counting: Counting) -> dict[str, Any]:
    length = done.end - done.start
    why = "the traced pass was interrupted" if again.cancelled else counting.abstained
    return {
        "trace_overhead": (again.end - again.start) / length if length else None,
        **counting.notes,
        **({"abstained": why} if why else {}),
    }


def _told(**facts: Any) -> dict[str, Any]:
    return {"times": "timed pass", "counts": "traced pass", **facts}
