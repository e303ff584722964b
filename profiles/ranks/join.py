"""One result of several ranks: pipeline stages, data-parallel ranks, or workers behind a router.

Counts and source lines are summed, requests come from the ranks where they ended, and what each device or loop has of
its own stays in ``ranks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ...sched.data_parallel.sync import RankShare
from ...sched.disagg.layout import RankLayout
from ..measure.counts import Row, weight
from ..measure.metrics import Metrics, acceptance_metrics, plain, request_metrics, transfer_metrics
from ..measure.requests import RequestRecord, RequestTotals
from ..measure.steps import is_iteration
from ..measure.waiting import OUTSIDE_TURNS, bubble
from ..platform.resolve import Resolved, speculation_depth
from ..record.result import Abstained, Hazards, Metric, OrderingRow, Outputs, RankPart, Result
from ..run.document import outputs_with
from ..run.rank_context import RankContext
from ..run.task import RankReport, RouterReport

Report = RankReport | RouterReport

APART: Final = "each rank has its own: see ranks"
_SUMS: Final = ("count", "steady", "bytes", "host_us", "exposed_us")
_AFTER_PREFILL: Final = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def join(
    resolved: Resolved, contexts: Sequence[RankContext], reports: Sequence[Report], missed: tuple[str, ...]
) -> Result:
    """The result of a run from the reports of all its ranks, in the order of ``contexts``. ``missed``: what of the
    script of failures the run did not come to."""
    ranks = [report for report in reports if isinstance(report, RankReport)]
    if len(contexts) == 1:
        return ranks[0].result
    failure = _failures(reports)
    if isinstance(reports[-1], RouterReport):
        result = _of_workers(resolved, contexts, ranks, reports[-1], failure)
    elif contexts[0].share is not None:
        result = _of_data_ranks(resolved, ranks, failure)
    else:
        result = _of_stages(contexts, ranks, failure)
    return result.model_copy(update={"run": result.run.model_copy(update={"missed": missed})})


def _failures(reports: Sequence[Report]) -> str | None:
    """Why the run broke off on each rank, in the order in which ranks came to their ends; None if it did not."""
    in_order = sorted(reports, key=lambda report: report.end)
    return "; ".join(dict.fromkeys(report.failure for report in in_order if report.failure)) or None


def _combined(first: Result, results: Sequence[Result], failure: str | None, **parts: Any) -> Result:
    """``first`` with what is alike for all kinds of ranks, and the ``parts`` that are not. That of a run that broke off
    has no digest."""
    leaks = "; ".join(result.run.leak for result in results if result.run.leak)
    common = {
        "run": first.run.model_copy(update={"failure": failure, "leak": leaks or None}),
        "per_step": _first_of_each_kind(result.per_step for result in results),
        "critical_path": _first_of_each_kind(result.critical_path for result in results),
        "copies": _summed(row for result in results for row in result.copies),
        "syncs": _summed(row for result in results for row in result.syncs),
        "idle": first.idle if isinstance(first.idle, Abstained) else Abstained(abstained=APART),
        "hazards": _all_hazards(results),
        "ordering": _all_ordering(results),
    }
    if failure is not None:
        parts["outputs"] = Abstained(abstained=f"the run broke off: {failure.partition('; ')[0]}")
    return first.model_copy(update=common | parts)


def _of_stages(contexts: Sequence[RankContext], stages: Sequence[RankReport], failure: str | None) -> Result:
    """Requests come from the first stage: they enter there, and their tokens return to it."""
    results = [stage.result for stage in stages]
    first, metrics = results[0], _request_metrics(stages[0].account, stages)
    return _combined(
        first,
        results,
        failure,
        metrics=_unless_untimed(first, metrics) | {"bubble_pct": _bubble(stages)},
        ranks=tuple(
            _rank_part(context.name, "pipeline", stage, {"bubble_pct": _bubble([stage]), **_bubbles(stage)})
            for context, stage in zip(contexts, stages, strict=True)
        ),
        outputs=_agreed(results),
    )


def _of_data_ranks(resolved: Resolved, ranks: Sequence[RankReport], failure: str | None) -> Result:
    """Each request comes from the rank that served it."""
    ranks = [_own_requests(rank, RankShare(index, len(ranks))) for index, rank in enumerate(ranks)]
    results = [rank.result for rank in ranks]
    first, account = results[0], RequestTotals.merged([rank.account for rank in ranks])
    rows = {row.id: row for result in results for row in result.requests}
    records = account.in_order()
    metrics = _unless_untimed(first, _request_metrics(account, ranks))
    return _combined(
        first,
        results,
        failure,
        metrics=metrics | _acceptance_metrics(resolved, account),
        ranks=tuple(
            _rank_part(f"rank {index}", "data", rank, {"idle_step_share": _idle_step_share(rank.result)})
            for index, rank in enumerate(ranks)
        ),
        requests=tuple(rows[record.id] for record in records),
        outputs=_outputs(records, ranks),
    )


def _of_workers(
    resolved: Resolved,
    contexts: Sequence[RankContext],
    workers: Sequence[RankReport],
    router: RouterReport,
    failure: str | None,
) -> Result:
    """Requests come from the workers on which they end for their clients, and lost ones from the router."""
    pair = resolved.scenario.engine.disaggregation
    places = [one.place for one in contexts if one.place is not None and not one.is_router]
    results = [worker.result for worker in workers]
    ending = [worker for place, worker in zip(places, workers, strict=True) if place.ends]
    first, account = ending[0].result, RequestTotals.merged([worker.account for worker in ending])
    rows = {row.id: row for worker in ending for row in worker.result.requests}
    rows |= {row.id: row for row in router.rows if row.id not in rows or row.status == "failed"}
    metrics = _request_metrics(account, workers)
    if pair.mode != "none":
        metrics |= transfer_metrics(account)
    outputs = _outputs(account.in_order(), ending)
    missing = _lost(account, router, transfers=pair.mode != "none")
    if missing and isinstance(outputs, Outputs):  # a digest without them would be equal to no other run's
        first_reason = next(iter(missing.values()))
        outputs = Abstained(abstained=f"{len(missing)} of {len(rows)} requests lost: {first_reason}")
    if pair.mode != "none" and pair.transfer == "fake":
        outputs = Abstained(abstained="KV was never sent, the tokens mean nothing")
    return _combined(
        first,
        results,
        failure,
        metrics=_unless_untimed(first, metrics) | _acceptance_metrics(resolved, account),
        ranks=tuple(_worker_part(place, worker) for place, worker in zip(places, workers, strict=True)),
        requests=tuple(sorted(rows.values(), key=lambda row: int(row.id[1:]))),
        outputs=outputs,
    )


def _own_requests(rank: RankReport, share: RankShare) -> RankReport:
    """The report without other ranks' requests: an interrupted rank ends all requests that it has received."""
    account = rank.account
    records = [record for record in account.records if share.owns(record.index)]
    names = {record.id for record in records}
    rows = tuple(row for row in rank.result.requests if row.id in names)
    own = replace(account, records=records)
    return rank._replace(account=own, result=rank.result.model_copy(update={"requests": rows}))


def _rank_part(name: str, role: str, rank: RankReport, own: Metrics) -> RankPart:
    result = rank.result
    return RankPart(
        name=name,
        role=role,
        per_step=result.per_step,
        idle=result.idle,
        metrics={**result.metrics, **own},
        critical_path=result.critical_path,
    )


def _worker_part(place: RankLayout, worker: RankReport) -> RankPart:
    """A prefill worker has no latencies of what comes after a request's prompt."""
    parts = transfer_metrics(worker.account) if place.role == "decode" else {}
    part = _rank_part(place.name, place.role, worker, _unless_untimed(worker.result, parts))
    if place.ends:
        return part
    metrics = {name: metric for name, metric in part.metrics.items() if name not in _AFTER_PREFILL}
    return part.model_copy(update={"metrics": metrics})


def _request_metrics(account: RequestTotals, ranks: Sequence[RankReport]) -> Metrics:
    """Latencies and throughput of all requests, and the KV of the fullest rank; metrics of a device or a loop abstain,
    as each rank has its own."""
    peak = max(rank.account.peak_kv_tokens for rank in ranks)
    apart = [name for name in ranks[-1].result.metrics if "." not in name]
    metrics: Metrics = dict.fromkeys(apart, Abstained(abstained=APART))
    return metrics | request_metrics(replace(account, peak_kv_tokens=peak))


def _acceptance_metrics(resolved: Resolved, account: RequestTotals) -> Metrics:
    """They count tokens, and are right where times mean nothing."""
    return acceptance_metrics(account.accepted, speculation_depth(resolved.scenario))


def _idle_step_share(result: Result) -> Metric | Abstained:
    """The share of steps in which the rank had no request of its own."""
    steps = {kind: counts.steps for kind, counts in result.per_step.items() if is_iteration(kind)}
    total = sum(steps.values())
    share = steps.get("idle", 0) / total if total else None
    return plain("idle_step_share", share, why="no step was counted")


def _bubble(stages: Sequence[RankReport]) -> Metric | Abstained:
    for stage in stages:
        busy = stage.result.metrics["gpu_busy"]
        if isinstance(busy, Abstained):
            return busy
    times = [stage.stage_time for stage in stages if stage.stage_time is not None]
    return plain("bubble_pct", bubble(times))


def _bubbles(stage: RankReport) -> Metrics:
    """The stage's own bubble, by the microbatch that its device waited for."""
    busy, time = stage.result.metrics["gpu_busy"], stage.stage_time
    if time is None or isinstance(busy, Abstained):
        return {}
    window = time.last - time.first
    return {
        f"bubble_pct.{'outside' if place == OUTSIDE_TURNS else f'mb{place}'}": plain(
            "bubble_pct", 100 * idle / window
        )
        for place, idle in sorted(time.idle.items())
    }


def _unless_untimed(result: Result, metrics: Metrics) -> Metrics:
    """All abstain where the result's times mean nothing, for the reason that it gives."""
    idle = result.idle
    return {name: idle if isinstance(idle, Abstained) else metric for name, metric in metrics.items()}


def _first_of_each_kind(ranks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of every kind of step, the part of the first rank that had any."""
    kinds = {kind: part for kinds in reversed([*ranks]) for kind, part in kinds.items()}
    return dict(sorted(kinds.items()))


def _summed(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows that differ in nothing but their sums as one row, the most exposed first."""
    found: dict[str, Row] = {}
    for row in rows:
        key = row.model_copy(update={name: 0 for name in _SUMS if hasattr(row, name)}).model_dump_json()
        before = found.get(key)
        if before is not None:
            sums = {name: getattr(before, name) + getattr(row, name) for name in _SUMS if hasattr(row, name)}
            row = row.model_copy(update=sums)
        found[key] = row
    return tuple(sorted(found.values(), key=weight))


def _all_hazards(results: Sequence[Result]) -> Hazards | Abstained:
    """The hazards of all ranks; abstained where one rank was not watched for them."""
    parts = [result.hazards for result in results]
    watched = [part for part in parts if isinstance(part, Hazards)]
    if len(watched) < len(parts):
        return parts[0]
    known = dict.fromkeys(name for part in watched for name in part.known)
    findings = {finding.identity: finding for part in watched for finding in part.findings}
    return Hazards(known=tuple(known), findings=tuple(findings.values()))


def _all_ordering(results: Sequence[Result]) -> tuple[OrderingRow, ...]:
    """A line is needed if one rank needs it."""
    rows = [row for result in results for row in result.ordering]
    needed = {(row.kind, row.site) for row in rows if row.needed}
    found = dict.fromkeys(row.model_copy(update={"needed": (row.kind, row.site) in needed}) for row in rows)
    return tuple(sorted(found, key=lambda row: (row.site.file, row.site.line)))


def _agreed(results: Sequence[Result]) -> Outputs | Abstained:
    outputs = [result.outputs for result in results]
    if any(other != outputs[0] for other in outputs):
        return Abstained(abstained="the stages took different tokens from the same steps")
    return outputs[0]


def _outputs(records: Sequence[RequestRecord], ranks: Sequence[RankReport]) -> Outputs | Abstained:
    for rank in ranks:
        if isinstance(rank.result.outputs, Abstained):
            return rank.result.outputs
    damage = {name: by for rank in ranks for name, by in rank.damage.items()}
    return outputs_with(records, damage, emulated=ranks[0].result.labels.emulated)


def _lost(account: RequestTotals, router: RouterReport, *, transfers: bool) -> dict[str, str]:
    """Requests that failed because something did not arrive, and why. A request that failed by what it asked for, such
    as a grammar that allows no further token, is part of the scenario, like one that was refused."""
    without_worker = {row.id: row.reason for row in router.rows if row.status == "failed"}
    without_kv = {
        record.id: record.reason
        for record in account.in_order()
        if transfers and record.status == "failed" and record.transferred is None
    }
    return without_kv | without_worker
