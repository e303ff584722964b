"""What a rank without a device runs: the router, which sends requests to workers and learns of their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...sched.disagg.router import run_router
from ...sched.observe import Clock
from ...sched.request import Request, Status
from ..platform.resolve import Resolved
from ..record.result import RequestRow
from .fault_injector import DiedError
from .feed import Feed, measured_workload, warmup_workload
from .rank_context import RankContext, align


class RouterReport(NamedTuple):
    """``rows``: requests that ended at the router, or nowhere. ``failure``: why the run broke off, if it did. ``end``:
    ns of the router's clock."""

    rows: Sequence[RequestRow]
    failure: str
    end: int


def route(resolved: Resolved, clock: Clock, context: RankContext, *, passes: int) -> RouterReport:
    """Serve the warm-up's workload, and then the measured one ``passes`` times: the same workloads as
    ``PreparedRun`` runs on each worker."""
    feed, injector = Feed(), context.fault_injector
    warmup = warmup_workload(resolved)
    workloads = [measured_workload(resolved) for _ in range(passes)]
    ended: Sequence[Request] = ()
    failure, start = "", 0
    for workload in workloads if warmup is None else [warmup, *workloads]:
        start = align(context, clock)
        feed.load(workload, start=start)
        if injector is not None and workload is not warmup:
            injector.arm()
        try:
            assert context.link is not None and context.place is not None
            ended = run_router(feed, context.link, clock, context.place)
        except KeyboardInterrupt:
            ended = _give_up(feed, Status.CANCELLED, "interrupted", clock.now())
            break
        except DiedError as death:
            failure = str(death)
            ended = _give_up(feed, Status.FAILED, failure, clock.now())
    return RouterReport([_row(request, start) for request in ended], failure, clock.now())


def _give_up(feed: Feed, status: Status, reason: str, now: int) -> Sequence[Request]:
    """End every request of the feed that is left; return them."""
    requests = feed.alive
    for request in requests:
        request.status, request.reason, request.finished_at = status, reason, now
    return requests


def _row(request: Request, start: int) -> RequestRow:
    """A row without tokens, which the router does not see."""
    assert request.finished_at is not None
    return RequestRow.model_validate(
        {
            "id": request.id,
            "arrival": request.arrival - start,
            "first_token": None,
            "finish": request.finished_at - start,
            "prompt_tokens": len(request.origin_input_ids),
            "output_tokens": 0,
            "status": request.status.value,
            "reason": request.reason,
        }
    )
