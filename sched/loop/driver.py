"""What a loop drives: a scheduler, or a worker that has one and a part of the work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..batch import ScheduleBatch, StepResult
from ..disagg.requests import Routed
from ..link import Link
from ..request import Request
from .engine import Engine
from .scheduler import Scheduler


class LoopDriver(Protocol):
    last_batch: ScheduleBatch | None

    @property
    def engine(self) -> Engine: ...

    @property
    def next_step(self) -> int: ...

    @property
    def running_batch(self) -> ScheduleBatch: ...

    def receive(self) -> None: ...

    def get_next_batch_to_run(self) -> ScheduleBatch | None: ...

    def launched(self, batch: ScheduleBatch) -> ScheduleBatch: ...

    def settle(self, batch: ScheduleBatch, result: StepResult) -> None: ...

    def rest(self) -> bool:
        """Nothing to run: wait for something. Returns False when nothing will come."""

    def give_up(self, launched: Iterable[ScheduleBatch], reason: str) -> None:
        """A rank is gone without which nothing goes on: end what is here; nobody settles what was launched."""

    def abort(self, req: Request, reason: str) -> None:
        """End ``req`` early, wherever it is."""


class Delegate:
    """Turns that are a scheduler's own, but for what a worker does otherwise."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def engine(self) -> Engine:
        return self._scheduler.engine

    @property
    def next_step(self) -> int:
        return self._scheduler.next_step

    @property
    def last_batch(self) -> ScheduleBatch | None:
        return self._scheduler.last_batch

    @last_batch.setter
    def last_batch(self, batch: ScheduleBatch | None) -> None:
        self._scheduler.last_batch = batch

    @property
    def running_batch(self) -> ScheduleBatch:
        return self._scheduler.running_batch

    def receive(self) -> None:
        self._scheduler.receive()

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        return self._scheduler.get_next_batch_to_run()

    def launched(self, batch: ScheduleBatch) -> ScheduleBatch:
        return self._scheduler.launched(batch)

    def settle(self, batch: ScheduleBatch, result: StepResult) -> None:
        self._scheduler.settle(batch, result)

    def give_up(self, launched: Iterable[ScheduleBatch], reason: str) -> None:
        self._scheduler.give_up(launched, reason)

    def abort(self, req: Request, reason: str) -> None:
        self._scheduler.abort(req, reason)


def link_of(engine: Engine) -> Link:
    """To the other ranks."""
    assert engine.link is not None
    return engine.link


def routed(engine: Engine) -> Routed:
    """The source of a worker behind a router."""
    assert isinstance(engine.source, Routed), "a worker's requests come from the router"
    return engine.source
