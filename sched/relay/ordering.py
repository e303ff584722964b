"""Policies about the order of streams, the isolation of forwards, the page table that they read, and the lifetime of
what they read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..batch import ScheduleBatch, StepResult, draft_step
from ..kernels import allocation, arrays
from .context import RelayContext, Step


def no_barrier(context: RelayContext) -> None:
    """Nothing orders the schedule's writes after the previous forward's reads."""


def barrier_at_top(context: RelayContext) -> None:
    """Order this iteration's schedule work behind the previous forward: a write-after-read barrier for page table,
    slots and relay rows (#26380)."""
    context.streams.wait(context.streams.schedule, context.streams.forward)


def barrier_after_launch(context: RelayContext, batch: ScheduleBatch) -> None:
    """The same before the previous result is settled, since settling rewrites page-table rows and frees slots too."""
    with context.observer.range("barrier", batch.step, batch.batch_size):
        context.streams.wait(context.streams.schedule, context.streams.forward)


def wait_until_read(context: RelayContext, batch: ScheduleBatch) -> None:
    """Order later schedule work behind the forward's reads of what the schedule may change, not behind its end."""
    streams = context.streams
    with context.observer.range("barrier", batch.step, batch.batch_size):
        if context.read_done is None:
            streams.wait(streams.schedule, streams.forward)
        elif streams.schedule is not streams.forward:
            streams.schedule.wait_event(context.read_done)


def nothing(context: RelayContext, batch: ScheduleBatch) -> None:
    """Do nothing: the state has no such part."""


@contextmanager
def isolate_then_resolve(
    context: RelayContext, resolve: Step, read_tables: Step, batch: ScheduleBatch
) -> Iterator[None]:
    """Copy the sampling state on the schedule stream, where penalties are accumulated too; then, on the forward
    stream and after all schedule work so far, resolve and run (before #25945)."""
    streams = context.streams
    with context.isolated(batch), streams.on(streams.forward):
        streams.wait(streams.forward, streams.schedule)
        with context.observer.range("resolve", _first_step(batch), batch.batch_size):
            resolve(batch)
            read_tables(batch)
        yield


@contextmanager
def resolve_then_isolate(
    context: RelayContext, resolve: Step, read_tables: Step, batch: ScheduleBatch
) -> Iterator[None]:
    """On the forward stream, after all schedule work so far: resolve on the batch itself, then run the forward on a
    copy of the sampling state (#25945)."""
    streams = context.streams
    with streams.on(streams.forward), ExitStack() as isolation:
        streams.wait(streams.forward, streams.schedule)
        with context.observer.range("resolve", _first_step(batch), batch.batch_size):
            resolve(batch)
            isolation.enter_context(context.isolated(batch))
            read_tables(batch)
        yield


@contextmanager
def isolate_in_place(
    context: RelayContext, resolve: Step, read_tables: Step, batch: ScheduleBatch
) -> Iterator[None]:
    """The overlapped worker in the serial loop: the forward changes the resolved batch, which is restored."""
    with resolve_in_place(context, resolve, read_tables, batch), context.isolated(batch):
        yield


@contextmanager
def resolve_in_place(
    context: RelayContext, resolve: Step, read_tables: Step, batch: ScheduleBatch
) -> Iterator[None]:
    """The serial loop: everything runs on the current stream, so that there is nothing to isolate."""
    with context.observer.range("resolve", _first_step(batch), batch.batch_size):
        resolve(batch)
        read_tables(batch)
    yield


def _first_step(batch: ScheduleBatch) -> int:
    """The step that the resolved input belongs to: a verify's is that of its drafts."""
    return batch.step if batch.spec_info is None else draft_step(batch.step)


def keep_in_ring(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Hold the batch, its fields and the worker's extra references for two launches."""
    context.launches += 1
    context.kept_alive[context.launches % len(context.kept_alive)] = [
        batch,
        *batch.references(),
        *result.extra_keep_alive_refs,
    ]


def host_waits(context: RelayContext, arrived: torch.Event) -> None:
    """Wait on the host until a pipeline's tokens are stored. Nothing else orders the next forward behind them."""
    arrived.synchronize()


def keep_nothing(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """With one stream the allocator's own order is enough."""


# ---- which page table a forward reads, and until when ---------------------------------------------------------


def shared_pages(req_to_token: torch.Tensor) -> torch.Tensor:
    """The schedule's own table, which must not change while a forward runs."""
    return req_to_token


def own_pages(req_to_token: torch.Tensor) -> torch.Tensor:
    """A table of the same size for the forward stream alone."""
    return torch.zeros_like(req_to_token)


def copy_tables(context: RelayContext, batch: ScheduleBatch) -> None:
    """Copy the batch's rows of the page table on the forward stream and record the event of the copy. The forward reads
    nothing else that the schedule may change."""
    if batch.spec_info is not None:
        copy_rows_ahead(context, batch)
    elif not batch.is_empty:
        longest = arrays.largest(batch.seq_lens_cpu)
        allocation.copy_pages(
            context.pages, context.req_to_token, batch.req_pool_indices, batch.seq_lens, longest
        )
    mark_read(context, batch)


def copy_rows_ahead(context: RelayContext, batch: ScheduleBatch) -> None:
    """Copy the rows with all slots that a speculative step may write."""
    spec = context.config.speculative
    assert spec is not None
    lens = batch.seq_lens + spec.overhang
    allocation.copy_pages(context.pages, context.req_to_token, batch.req_pool_indices, lens, batch.longest)


def copy_prompt_tables(context: RelayContext, batch: ScheduleBatch) -> None:
    """As ``copy_tables``, unless ``resolve`` has copied the rows together with making positions."""
    if batch.positions is None:
        copy_tables(context, batch)
    else:
        mark_read(context, batch)


def mark_read(context: RelayContext, batch: ScheduleBatch) -> None:
    """Record the event behind which the forward reads nothing that the schedule may change."""
    if context.config.capabilities.events:
        context.read_done = context.streams.module.Event()
        context.read_done.record()
