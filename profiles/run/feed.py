"""A workload as the scheduler's source of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...scenarios.workload import Workload
from ...sched.request import Request


class Feed:
    """Hands out one workload at a time; its instants count from when it was loaded."""

    def __init__(self) -> None:
        self._arrived: deque[Request] = deque()  # replies of closed-loop clients
        self._alive: dict[str, Request] = {}
        self._workload: Workload | None = None
        self._start = 0
        self._next: Request | None = None

    def load(self, workload: Workload, *, start: int) -> None:
        self._workload = workload
        self._upcoming = workload.upcoming()
        self._start = start
        self._advance()

    @property
    def alive(self) -> Sequence[Request]:
        """Requests that were handed out and have not ended."""
        return list(self._alive.values())

    def due(self, now: int) -> Sequence[Request]:
        due: list[Request] = []
        while self._next is not None and self._next.arrival <= now:
            due.append(self._next)
            self._advance()
        due.extend(self._arrived)
        self._arrived.clear()
        for request in due:
            self._alive[request.id] = request
            if self._aborts_after(request) == 0:
                request.to_finish = ABORTED
        return due

    def next_at(self) -> int | None:
        if self._arrived:
            return self._arrived[0].arrival
        return None if self._next is None else self._next.arrival

    def ended(self, request: Request, now: int) -> None:
        self._alive.pop(request.id, None)
        assert self._workload is not None
        reply = self._workload.on_end(request, now)
        if reply is not None:
            self._arrived.append(reply)

    def aborts_now(self, request: Request) -> bool:
        """Whether the script has the client of ``request`` go away at its present output."""
        after = self._aborts_after(request)
        return after is not None and len(request.output_ids) >= after

    def _aborts_after(self, request: Request) -> int | None:
        assert self._workload is not None
        return self._workload.aborts.get(request.id)

    def _advance(self) -> None:
        self._next = next(self._upcoming, None)
        if self._next is not None:
            self._next.arrival += self._start


ABORTED = "aborted by its client"
