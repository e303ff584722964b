"""What a loop drives: a scheduler, or a worker that has one and a part of the work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..batch import ScheduleBatch, StepResult
from .engine import Engine


class Turns(Protocol):
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
