"""The router in front of several workers, and the request sources of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..link import Link, LinkError
from ..observe import Clock
from ..request import Request, RequestSource, Status
from .layout import ENDED, REQUEST, RankLayout

_MOST_TIMEOUTS = 6  # in a row; a worker times out once and reports requests that make no progress itself


class _OpenRequests:
    """Requests that were sent to workers and have not ended."""

    def __init__(self, source: RequestSource, clock: Clock) -> None:
        self.open: dict[str, Request] = {}
        self.failed: list[Request] = []
        self._source = source
        self._clock = clock

    def receive(self) -> Sequence[Request]:
        due = self._source.due(self._clock.now())
        self.open.update({req.id: req for req in due})
        return due

    def ended(self, name: str) -> None:
        """Report an ending to the source; ignored for a request that the router has failed before."""
        req = self.open.pop(name, None)
        if req is not None:
            self._source.ended(req, self._clock.now())

    def fail(self, req: Request, reason: str) -> None:
        req.status, req.reason, req.finished_at = Status.FAILED, reason, self._clock.now()
        self.failed.append(req)
        self.ended(req.id)


def run_router(source: RequestSource, link: Link, clock: Clock, layout: RankLayout) -> Sequence[Request]:
    """Send every request to its workers until all have ended. Returns the requests that the router itself has ended,
    because their workers are gone or do not answer."""
    requests, timeouts = _OpenRequests(source, clock), 0
    while True:
        gone = link.gone()
        for req in requests.receive():
            workers = layout.workers_of(req.index)
            absent = [rank for rank in workers if rank in gone]
            for rank in workers if not absent else ():
                link.send(rank, REQUEST, req)
            for rank in absent[:1]:
                requests.fail(req, layout.gone_reason(rank, gone))
        while (message := link.poll(ENDED)) is not None:
            timeouts = 0
            requests.ended(message.value)
        for req in [req for req in requests.open.values() if layout.ends_at(req.index) in gone]:
            requests.fail(req, layout.gone_reason(layout.ends_at(req.index), gone))
        at = source.next_at()
        if not requests.open and at is None:
            break
        try:
            link.wait((ENDED,), at)
        except LinkError as error:
            timeouts += 1
            for req in list(requests.open.values()) if timeouts == _MOST_TIMEOUTS else ():
                worker = layout.name_of(layout.ends_at(req.index))
                requests.fail(req, f"{worker} did not report its end: {error}, {timeouts} times")
    for rank in range(layout.router):
        link.send(rank, REQUEST, None)
    return requests.failed


class RoutedSource:
    """The request source of a worker behind a router."""

    def __init__(self, link: Link, layout: RankLayout) -> None:
        self.layout = layout
        self.over = False  # the router has no more requests
        self._link = link

    def due(self, now: int) -> Sequence[Request]:  # noqa: ARG002
        """Requests that the router has sent since the last call."""
        arrived: list[Request] = []
        while (message := self._link.poll(REQUEST)) is not None:
            self.over = message.value is None
            if message.value is not None:
                arrived.append(_part_of(self.layout, message.value))
        return arrived

    def next_at(self) -> int | None:
        """None: arrivals depend on the router."""
        return None

    def ended(self, request: Request, now: int) -> None:  # noqa: ARG002
        if self.layout.ends:
            self._link.send(self.layout.router, ENDED, request.id)

    def require_router(self, gone: Mapping[int, str]) -> None:
        """Raise LinkError if the router is among the ``gone`` ranks and has not announced the end of the workload.
        ``gone`` must have been read before the last call of ``due``."""
        layout = self.layout
        if layout.router in gone and not self.over:
            raise LinkError(
                f"{layout.name} waited for requests, and {layout.gone_reason(layout.router, gone)}"
            )

    def closes(self) -> bool:
        """Whether the router has announced the end of the workload; resets the state for the next workload."""
        over, self.over = self.over, False
        return over


class WorkerSource:
    """A worker's requests of ``source``, where workers are independent (``transfer: fake``) and no router sends them.
    Every worker runs the whole source; requests of other workers end as they arrive."""

    def __init__(self, source: RequestSource, layout: RankLayout) -> None:
        self._source = source
        self._layout = layout

    def due(self, now: int) -> Sequence[Request]:
        own: list[Request] = []
        for req in self._source.due(now):
            if self._layout.rank in self._layout.workers_of(req.index):
                own.append(_part_of(self._layout, req))
            else:
                self._source.ended(req, now)
        return own

    def next_at(self) -> int | None:
        return self._source.next_at()

    def ended(self, request: Request, now: int) -> None:
        self._source.ended(request, now)


def _part_of(layout: RankLayout, req: Request) -> Request:
    """The part of the request that the worker has: a prefill worker's ends with the first token."""
    if layout.role == "prefill":
        req.sampling = replace(req.sampling, max_new_tokens=1)
    return req
