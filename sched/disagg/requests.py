"""Requests on their way: from the router, which knows the clients, to the workers, and their ends back to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ..link import Link, LinkError
from ..observe import Clock
from ..request import Request, Status
from .messages import ENDED, REQUEST
from .place import RankLayout

_SILENCES = 6  # deadlines of the link's; workers have one, and watch over those who make no headway


class RequestSource(Protocol):
    def due(self, now: int) -> Sequence[Request]: ...

    def next_at(self) -> int | None: ...

    def ended(self, request: Request, now: int) -> None: ...


class _Clients:
    """Those that wait for their requests."""

    def __init__(self, source: RequestSource, clock: Clock) -> None:
        self.alive: dict[str, Request] = {}
        self.failed: list[Request] = []
        self._source = source
        self._clock = clock

    def come(self) -> Sequence[Request]:
        due = self._source.due(self._clock.now())
        self.alive.update({req.id: req for req in due})
        return due

    def ended(self, name: str) -> None:
        """Of a request that was given up here, it is too late to hear."""
        req = self.alive.pop(name, None)
        if req is not None:
            self._source.ended(req, self._clock.now())

    def fail(self, req: Request, reason: str) -> None:
        req.status, req.reason, req.finished_at = Status.FAILED, reason, self._clock.now()
        self.failed.append(req)
        self.ended(req.id)


def run_router(source: RequestSource, link: Link, clock: Clock, place: RankLayout) -> Sequence[Request]:
    """Send every request to its workers, until all have ended. Returns those that ended here: whose workers are
    gone, or silent."""
    clients, silences = _Clients(source, clock), 0
    while True:
        gone = link.gone()
        for req in clients.come():
            workers = place.workers_of(req.index)
            absent = [rank for rank in workers if rank in gone]
            for rank in workers if not absent else ():
                link.send(rank, REQUEST, req)
            for rank in absent[:1]:
                clients.fail(req, lost(place, rank, gone))
        while (message := link.poll(ENDED)) is not None:
            silences = 0
            clients.ended(message.value)
        for req in [req for req in clients.alive.values() if place.ends_at(req.index) in gone]:
            clients.fail(req, lost(place, place.ends_at(req.index), gone))
        at = source.next_at()
        if not clients.alive and at is None:
            break
        try:
            link.wait((ENDED,), at)
        except LinkError as error:
            silences += 1
            for req in list(clients.alive.values()) if silences == _SILENCES else ():
                silent = place.name_of(place.ends_at(req.index))
                clients.fail(req, f"{silent} never said that it ended: {error}, {silences} times")
    for worker in range(place.router):
        link.send(worker, REQUEST, None)
    return clients.failed


def lost(place: RankLayout, rank: int, gone: Mapping[int, str]) -> str:
    """Why nothing comes from that rank any more."""
    return f"{place.name_of(rank)} is gone: {gone[rank]}"


class Routed:
    """A worker's source. The prefill worker's part of a request is its first token."""

    def __init__(self, link: Link, place: RankLayout) -> None:
        self.place = place
        self.over = False  # the router has nothing more
        self._link = link

    def due(self, now: int) -> Sequence[Request]:  # noqa: ARG002
        """What has arrived by now."""
        arrived: list[Request] = []
        while (message := self._link.poll(REQUEST)) is not None:
            self.over = message.value is None
            if message.value is not None:
                arrived.append(self._own(message.value))
        return arrived

    def next_at(self) -> int | None:
        """The router says."""
        return None

    def ended(self, request: Request, now: int) -> None:  # noqa: ARG002
        if self.place.ends:
            self._link.send(self.place.router, ENDED, request.id)

    def needs_router(self, gone: Mapping[int, str]) -> None:
        """``gone`` was known before the last requests were taken. Raises LinkError when the router is among them, and
        has not said that there will be no more."""
        place = self.place
        if place.router in gone and not self.over:
            raise LinkError(f"{place.name} waited for requests, and {lost(place, place.router, gone)}")

    def closes(self) -> bool:
        """Whether the router has nothing more; the next workload begins anew."""
        over, self.over = self.over, False
        return over

    def _own(self, req: Request) -> Request:
        if self.place.role == "prefill":
            req.sampling = replace(req.sampling, max_new_tokens=1)
        return req
