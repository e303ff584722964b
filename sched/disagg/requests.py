"""Requests on their way: from the router, which knows the clients, to the workers, and their ends back to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..link import FOREVER, Link
from ..observe import Clock
from ..request import Request
from .messages import ENDED, REQUEST
from .place import Place


class Source(Protocol):
    def due(self, now: int) -> Sequence[Request]: ...

    def next_at(self) -> int | None: ...

    def ended(self, request: Request, now: int) -> None: ...


def run_router(source: Source, link: Link, clock: Clock, place: Place) -> None:
    """Send every request to both its workers, until all have ended. Raises LinkError."""
    alive: dict[str, Request] = {}
    while True:
        for req in source.due(clock.now()):
            alive[req.id] = req
            link.send(place.prefill_of(req.index), REQUEST, req)
            link.send(place.decode_of(req.index), REQUEST, req)
        while (message := link.poll(ENDED)) is not None:
            source.ended(alive.pop(message.value), clock.now())
        at = source.next_at()
        if not alive and at is None:
            break
        link.wait((ENDED,), FOREVER if at is None else at)  # workers watch over one another
    for worker in range(place.router):
        link.send(worker, REQUEST, None)


class Routed:
    """A worker's source. The prefill worker's part of a request is its first token."""

    def __init__(self, link: Link, place: Place) -> None:
        self._link = link
        self._place = place
        self._over = False

    def due(self, now: int) -> Sequence[Request]:  # noqa: ARG002
        """What has arrived by now."""
        arrived: list[Request] = []
        while (message := self._link.poll(REQUEST)) is not None:
            self._over = message.value is None
            if message.value is not None:
                arrived.append(self._own(message.value))
        return arrived

    def next_at(self) -> int | None:
        """The router says."""
        return None

    def ended(self, request: Request, now: int) -> None:  # noqa: ARG002
        if self._place.role == "decode":
            self._link.send(self._place.router, ENDED, request.id)

    def closes(self) -> bool:
        """Whether the router has nothing more; the next workload begins anew."""
        over, self._over = self._over, False
        return over

    def _own(self, req: Request) -> Request:
        if self._place.role == "prefill":
            req.sampling = replace(req.sampling, max_new_tokens=1)
        return req
