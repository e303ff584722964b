"""Workloads of a run, and the source from which the scheduler takes their requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...scenarios.schema import Scenario
from ...scenarios.workload import Workload, build
from ...sched.request import Request, Status
from ..platform.resolve import Resolved

ABORTED = "aborted by its client"
# The warm-up's requests are drawn with a seed of their own.
_WARMUP_SEED = 0x5EED


def measured_workload(resolved: Resolved) -> Workload:
    return _workload(resolved, resolved.scenario, resolved.scenario.measure.seed)


def warmup_workload(resolved: Resolved) -> Workload | None:
    """Its requests are not aborted. None where nothing is warmed up: without warm-up requests, and for a trace."""
    scenario = resolved.scenario
    count = scenario.measure.warmup_requests
    if not count or scenario.workload.trace is not None:
        return None
    fewer = scenario.workload.model_copy(update={"requests": count, "abort": None})
    scenario = scenario.model_copy(update={"workload": fewer})
    return _workload(resolved, scenario, scenario.measure.seed ^ _WARMUP_SEED)


def _workload(resolved: Resolved, scenario: Scenario, seed: int) -> Workload:
    # With block diffusion no prompt has the vocabulary's last id, which is the mask.
    vocab_size = resolved.model.vocab_size - scenario.engine.block_diffusion.enabled
    return build(scenario, vocab_size=vocab_size, context_len=resolved.model.max_positions, seed=seed)


class Feed:
    """The scheduler's source of requests, for one workload at a time. A workload's instants count from its loading."""

    def __init__(self) -> None:
        self._replies: deque[Request] = deque()  # next requests of closed-loop clients
        self._alive: dict[str, Request] = {}
        self._workload: Workload | None = None
        self._start = 0
        self._next: Request | None = None

    def load(self, workload: Workload, *, start: int) -> None:
        self._workload = workload
        self._upcoming = workload.upcoming()
        self._start = start
        self._advance()

    def give_up(self, status: Status, reason: str, now: int) -> Sequence[Request]:
        """End every request that the scheduler has taken and that has not ended; return them. ``now`` in ns."""
        # Of a finished request, other ranks have not received yet that it is.
        left = [request for request in self._alive.values() if not request.finished]
        for request in left:
            request.status, request.reason, request.finished_at = status, reason, now
        return left

    def due(self, now: int) -> Sequence[Request]:
        due: list[Request] = []
        while self._next is not None and self._next.arrival <= now:
            due.append(self._next)
            self._advance()
        due.extend(self._replies)
        self._replies.clear()
        for request in due:
            self._alive[request.id] = request
            if self.aborts_now(request):
                request.end_with_next_token(ABORTED)
        return due

    def next_at(self) -> int | None:
        if self._replies:
            return self._replies[0].arrival
        return None if self._next is None else self._next.arrival

    def ended(self, request: Request, now: int) -> None:
        self._alive.pop(request.id, None)
        assert self._workload is not None
        reply = self._workload.on_end(request, now)
        if reply is not None:
            self._replies.append(reply)

    def aborts_now(self, request: Request) -> bool:
        """Whether the workload has the client abort ``request`` at its present number of output tokens."""
        assert self._workload is not None
        after = self._workload.aborts.get(request.id)
        return after is not None and len(request.output_ids) >= after

    def _advance(self) -> None:
        self._next = next(self._upcoming, None)
        if self._next is not None:
            self._next.arrival += self._start
