"""One result of workers that shared the requests of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ...sched.disagg.layout import RankLayout
from ..measure import latency
from ..measure.acceptance import AcceptanceLog
from ..measure.collector import Metrics, acceptance_metrics, distributed, request_metrics
from ..measure.requests import Account, RequestRecord
from ..record.result import (
    Abstained,
    CopyRow,
    KindCounts,
    Metric,
    Outputs,
    RankPart,
    RequestRow,
    Result,
    SyncRow,
)
from ..run.passes import outputs_with
from .ranks import all_hazards, failure

Row = TypeVar("Row", CopyRow, SyncRow)

_SUMS = ("count", "steady", "bytes", "host_us", "exposed_us")
APART = "each rank has its own: see ranks"
_BEHIND = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
_UNSENT = "KV was never sent, the tokens mean nothing"
_NOBODY = "no request ran long enough"


class WorkerReport(NamedTuple):
    """One worker's run. ``damage`` is what KV slots that do not add up came to, by request."""

    result: Result
    account: Account
    acceptance: AcceptanceLog
    damage: Mapping[str, int]
    end: int  # ns of its own clock


class RouterReport(NamedTuple):
    """The router's run: requests that ended there, or not at all; why it broke off, and when it was over, ns."""

    rows: Sequence[RequestRow]
    failure: str
    end: int


def whole(
    places: Sequence[RankLayout],
    workers: Sequence[WorkerReport],
    routing: RouterReport,
    *,
    sent: bool | None,
    drafts: int,
) -> Result:
    """Requests are told by the workers that decoded them, and by the router if those are lost. ``sent``: there was a
    transfer, None where workers do all by themselves; ``drafts``: how many tokens deep they speculate."""
    results = [heard.result for heard in workers]
    broken = _failure(workers, routing)
    deciding = [heard for place, heard in zip(places, workers, strict=False) if place.ends]
    first = deciding[0].result
    account = Account.merged([heard.account for heard in deciding])
    records = account.in_order()
    rows = {row.id: row for heard in deciding for row in heard.result.requests}
    rows |= {row.id: row for row in routing.rows if row.id not in rows or row.status == "failed"}
    parts = {} if sent is None else _split(account, exact=exact_of(results[-1]))
    missing = _lost(account, routing, transfers=sent is not None)
    return first.model_copy(
        update={
            "metrics": told(first, of_requests(account, results) | parts) | acceptance_of(deciding, drafts),
            "per_step": first_of_each_kind(results),
            "copies": summed(row for result in results for row in result.copies),
            "syncs": summed(row for result in results for row in result.syncs),
            "idle": first.idle if void(first) else Abstained(abstained=APART),
            "ranks": tuple(_rank(place, heard) for place, heard in zip(places, workers, strict=False)),
            "run": first.run.model_copy(update={"failure": broken}),
            "requests": tuple(sorted(rows.values(), key=lambda row: int(row.id[1:]))),
            "outputs": Abstained(abstained=_UNSENT)
            if sent is False
            else _all_but(missing, len(rows), outputs_of_all(records, deciding, broken)),
            "hazards": all_hazards(results),
        }
    )


def of_requests(account: Account, results: Sequence[Result]) -> Metrics:
    """What is a device's or a loop's is told by each worker."""
    last = results[-1]
    metrics: Metrics = {name: Abstained(abstained=APART) for name in last.metrics if "." not in name}
    metrics |= request_metrics(account, exact=exact_of(last))
    return metrics | {"peak_kv_tokens": fullest(results)}


def acceptance_of(deciding: Sequence[WorkerReport], drafts: int) -> Metrics:
    log = AcceptanceLog.merged(heard.acceptance for heard in deciding)
    return acceptance_metrics(log, drafts, exact=exact_of(deciding[0].result))


def _split(account: Account, *, exact: bool) -> Metrics:
    """What the time to first token is made of besides the queue."""
    parts = {
        "prefill_ms": latency.prefilling(account.records),
        "transfer_ms": latency.transfer(account.records),
        "decode_queue_ms": latency.decode_queueing(account.records),
    }
    return {name: distributed(name, part, exact=exact, why=_NOBODY) for name, part in parts.items()}


def told(result: Result, metrics: Metrics) -> Metrics:
    """Nothing, for the reason that the result itself has, where its times mean nothing."""
    idle = result.idle
    return {name: idle if isinstance(idle, Abstained) else metric for name, metric in metrics.items()}


def exact_of(result: Result) -> bool:
    return all(metric.exact for metric in result.metrics.values() if isinstance(metric, Metric))


def void(result: Result) -> bool:
    """Whether times mean nothing."""
    return isinstance(result.idle, Abstained)


def fullest(results: Sequence[Result]) -> Metric | Abstained:
    """Of several pools: the most tokens that one of them held."""
    return max((result.metrics["peak_kv_tokens"] for result in results), key=_value)


def _value(metric: Metric | Abstained) -> float:
    return metric.values[0] if isinstance(metric, Metric) else -1.0


def first_of_each_kind(results: Sequence[Result]) -> dict[str, KindCounts]:
    """Of every kind, the steps of the first worker that had any."""
    kinds: dict[str, KindCounts] = {}
    for result in results:
        for kind, counts in result.per_step.items():
            kinds.setdefault(kind, counts)
    return dict(sorted(kinds.items()))


def summed(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Alike lines of all workers as one, the most exposed first."""
    found: dict[str, Row] = {}
    for row in rows:
        key = row.model_copy(update={name: 0 for name in _SUMS if hasattr(row, name)}).model_dump_json()
        before = found.get(key)
        if before is not None:
            sums = {name: getattr(before, name) + getattr(row, name) for name in _SUMS if hasattr(row, name)}
            row = row.model_copy(update=sums)
        found[key] = row
    return tuple(
        sorted(found.values(), key=lambda r: (-r.exposed_us, -r.host_us, -r.count, r.model_dump_json()))
    )


def _rank(place: RankLayout, heard: WorkerReport) -> RankPart:
    """A prefill worker knows nothing of a request's life behind its prompt."""
    result, metrics = heard.result, heard.result.metrics
    if not place.ends:
        metrics = {name: metric for name, metric in metrics.items() if name not in _BEHIND}
    elif place.role == "decode":
        metrics = metrics | told(result, _split(heard.account, exact=exact_of(result)))
    return RankPart(
        name=place.name,
        role=place.role,
        per_step=result.per_step,
        idle=result.idle,
        metrics=metrics,
    )


def _failure(workers: Sequence[WorkerReport], routing: RouterReport) -> str | None:
    return failure([*ends_of(workers), (routing.end, routing.failure)])


def _lost(account: Account, routing: RouterReport, *, transfers: bool) -> dict[str, str]:
    """Requests that failed because something did not come, and why; one that failed by what it asked for, as a grammar
    that allows nothing more, is no less part of the scenario than one that was refused."""
    unheard = {row.id: row.reason for row in routing.rows if row.status == "failed"}
    without_kv = {
        record.id: record.reason
        for record in account.in_order()
        if transfers and record.status == "failed" and record.transferred is None
    }
    return without_kv | unheard


def _all_but(missing: Mapping[str, str], total: int, outputs: Outputs | Abstained) -> Outputs | Abstained:
    """A digest over what is left would be equal to no other run's."""
    if not missing or isinstance(outputs, Abstained):
        return outputs
    first = next(iter(missing.values()))
    return Abstained(abstained=f"{len(missing)} of {total} requests were lost: {first}")


def ends_of(workers: Sequence[WorkerReport]) -> Sequence[tuple[int, str]]:
    """When each was over, and what broke it off."""
    return [(heard.end, heard.result.run.failure or "") for heard in workers]


def outputs_of_all(
    records: Sequence[RequestRecord], deciding: Sequence[WorkerReport], broken: str | None
) -> Outputs | Abstained:
    if broken is not None:
        return Abstained(abstained=f"the run broke off: {broken.partition('; ')[0]}")
    for heard in deciding:
        if isinstance(heard.result.outputs, Abstained):
            return heard.result.outputs
    damage = {name: by for heard in deciding for name, by in heard.damage.items()}
    return outputs_with(records, damage)
