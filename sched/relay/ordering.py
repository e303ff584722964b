"""Which stream waits for which, what a forward may see change, and what must stay alive: ``barrier``, ``reads_done``,
``isolate``, ``keep_alive``, ``open``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

from ..batch import ScheduleBatch, StepResult
from .desk import Desk

_fields = attrgetter(*ScheduleBatch.__slots__)


def no_barrier(desk: Desk) -> None:
    """Nothing orders the schedule's writes after the previous forward's reads."""


def barrier_at_top(desk: Desk) -> None:
    """Schedule work of this iteration comes after the previous forward: write-after-read on page table, slots
    and relay rows (#26380)."""
    desk.streams.wait(desk.streams.schedule, desk.streams.forward)


def nothing(desk: Desk, batch: ScheduleBatch) -> None:
    """This state has no answer to the question."""


@contextmanager
def resolve_then_isolate(
    desk: Desk, resolve: Callable[[ScheduleBatch], None], batch: ScheduleBatch
) -> Iterator[None]:
    """On the forward stream, after all schedule work so far: resolve on the batch itself, then run the forward on a
    copy of the sampling state (#25945)."""
    streams = desk.streams
    with streams.on(streams.forward):
        streams.wait(streams.forward, streams.schedule)
        with desk.observer.range("resolve", batch.step, batch.batch_size):
            resolve(batch)
        with _sampling_isolated(batch):
            yield


@contextmanager
def resolve_in_place(
    desk: Desk, resolve: Callable[[ScheduleBatch], None], batch: ScheduleBatch
) -> Iterator[None]:
    """The serial loop: everything on the current stream, nothing to isolate from."""
    with desk.observer.range("resolve", batch.step, batch.batch_size):
        resolve(batch)
    yield


@contextmanager
def _sampling_isolated(batch: ScheduleBatch) -> Iterator[None]:
    kept = batch.sampling_info
    assert kept is not None
    batch.sampling_info = kept.copy_for_forward()
    try:
        yield
    finally:
        batch.sampling_info = kept


def keep_in_ring(desk: Desk, batch: ScheduleBatch, result: StepResult) -> None:
    """Hold the batch and all that its fields refer to for two launches, with the worker's extras."""
    desk.launches += 1
    desk.ring[desk.launches % len(desk.ring)] = [batch, *_fields(batch), *result.extra_keep_alive_refs]


def keep_nothing(desk: Desk, batch: ScheduleBatch, result: StepResult) -> None:
    """One stream: the allocator's own order is enough."""
