"""Data-parallel ranks, each with its part of the requests, and one result of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...sched.data_parallel.share import RankShare
from ...sched.link import Link
from ..measure.collector import plain
from ..measure.requests import Account
from ..measure.steps import is_iteration
from ..platform.resolve import Resolved
from ..platform.speculation import speculation_depth
from ..record.result import Abstained, Metric, RankPart, Result
from ..run.rank_context import RankContext
from .pairs import (
    APART,
    WorkerReport,
    acceptance_of,
    ends_of,
    exact_of,
    first_of_each_kind,
    of_requests,
    outputs_of_all,
    summed,
    told,
    void,
)
from .ranks import Assembly, all_hazards, failure


def _seat(resolved: Resolved, link: Link) -> RankContext:
    return RankContext(link, share=RankShare(link.rank, resolved.scenario.engine.ranks))


def _shared(resolved: Resolved, ranks: Sequence[WorkerReport]) -> Result:
    """Each request is told by the rank that had it."""
    heard = [_own(rank, RankShare(index, len(ranks))) for index, rank in enumerate(ranks)]
    results, broken = [rank.result for rank in heard], failure(ends_of(heard))
    first, account = results[0], Account.merged([rank.account for rank in heard])
    rows = {row.id: row for result in results for row in result.requests}
    drafts = speculation_depth(resolved.scenario)
    return first.model_copy(
        update={
            "run": first.run.model_copy(update={"failure": broken}),
            "metrics": told(first, of_requests(account, results) | acceptance_of(heard, drafts)),
            "per_step": first_of_each_kind(results),
            "copies": summed(row for result in results for row in result.copies),
            "syncs": summed(row for result in results for row in result.syncs),
            "idle": first.idle if void(first) else Abstained(abstained=APART),
            "ranks": tuple(_part(index, rank) for index, rank in enumerate(heard)),
            "requests": tuple(rows[record.id] for record in account.in_order()),
            "outputs": outputs_of_all(account.in_order(), heard, broken),
            "hazards": all_hazards(results),
        }
    )


def _own(heard: WorkerReport, share: RankShare) -> WorkerReport:
    """An interrupted rank ends all requests that it knows of, others' too."""
    records = [record for record in heard.account.records if share.owns(record.index)]
    names = {record.id for record in records}
    account = Account(
        records,
        heard.account.gaps,
        heard.account.production,
        heard.account.retractions,
        heard.account.peak_kv_tokens,
    )
    rows = tuple(row for row in heard.result.requests if row.id in names)
    return heard._replace(account=account, result=heard.result.model_copy(update={"requests": rows}))


def _part(index: int, heard: WorkerReport) -> RankPart:
    result = heard.result
    return RankPart(
        name=f"rank {index}",
        role="data",
        per_step=result.per_step,
        idle=result.idle,
        metrics={**result.metrics, "idle_step_share": _idle_steps(result)},
    )


def _idle_steps(result: Result) -> Metric | Abstained:
    """The share of steps in which the rank had nothing of its own."""
    steps = {kind: counts.steps for kind, counts in result.per_step.items() if is_iteration(kind)}
    total = sum(steps.values())
    share = steps.get("idle", 0) / total if total else None
    return plain("idle_step_share", share, exact=exact_of(result), why="no step was counted")


DATA_PARALLEL: Final = Assembly(_seat, _shared)
