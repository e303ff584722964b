"""Invariants of a batch between steps: one row per request, and correct host mirrors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ...sched.batch import ROW_FIELDS, ScheduleBatch
from ...sched.relay.context import RelayContext
from ...sched.relay.row import RelayRow
from ...sched.request import Request, Status
from .violations import Violation

# Reads a device tensor without any call that the device counts or orders.
Peek = Callable[[torch.Tensor], torch.Tensor]


def checking_allocation(row: RelayRow, peek: Peek, found: Callable[[Iterator[Violation]], None]) -> RelayRow:
    """The same row; the lengths by which the schedule allocates a decode's slots are compared with the host's."""

    def allocation_lengths(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
        lengths = row.allocation_lengths(context, batch)
        found(_misallocated(batch, peek(lengths).tolist()))
        return lengths

    return replace(row, allocation_lengths=allocation_lengths)


def _misallocated(batch: ScheduleBatch, lengths: list[int]) -> Iterator[Violation]:
    for req, given, meant in zip(batch.reqs, lengths, batch.seq_lens_cpu.tolist(), strict=True):
        if given != meant:
            text = f"step {batch.step} allocates request {req.id}'s slot by length {given}, not {meant}"
            yield Violation("slots are allocated by the host's lengths", "seq_lens", text, batch.step, req.id)


def row_counts(batch: ScheduleBatch, name: str) -> Iterator[Violation]:
    """An empty batch may have stale rows: it is never merged, so they are never read."""
    if batch.is_empty:
        return
    tensors = {field: getattr(batch, field, None) for field in ROW_FIELDS}
    odd = {f: len(t) for f, t in tensors.items() if t is not None and len(t) != batch.batch_size}
    if odd:
        rows = ", ".join(f"{field}: {count}" for field, count in odd.items())
        text = f"{name} has other rows than its {batch.batch_size} requests ({_some(batch.reqs)}): {rows}"
        yield Violation("a row for each request", next(iter(odd)), text, batch.step)


def mirrors(
    batch: ScheduleBatch,
    name: str,
    peek: Peek,
    *,
    lengths: bool,
    sentinels: bool = False,
    settled: bool = True,
) -> Iterator[Violation]:
    """Compare device values with their host mirrors, and these with the requests. ``lengths``: whether the device's
    lengths are compared. ``sentinels``: whether negative ones stand for lengths that the next forward looks up.
    ``settled``: whether the host's lengths are those of the requests."""
    if batch.is_empty or any(True for _ in row_counts(batch, name)):
        return
    rows, lens = getattr(batch, "req_pool_indices_cpu", None), getattr(batch, "seq_lens_cpu", None)
    if rows is None:
        field = "req_pool_indices_cpu"
        yield Violation("mirrors equal device values", field, f"{name} has no {field}", batch.step)
        return
    yield from _unlike_device(batch, name, "req_pool_indices", rows, peek)
    for req, row in _running(batch, rows):
        yield from _unlike_request(batch, name, req, "req_pool_indices_cpu", row, req.req_pool_idx)
    if lens is not None and lengths:
        yield from _unlike_device(batch, name, "seq_lens", lens, peek, sentinels=sentinels)
    if lens is not None and settled:
        for req, length in _running(batch, lens):
            yield from _unlike_request(batch, name, req, "seq_lens_cpu", length, req.kv_committed_len)


def untouched(batch: ScheduleBatch, before: torch.Tensor | None) -> Iterator[Violation]:
    """After a speculative forward, the batch's lengths are unchanged, and an uploaded prompt is not staged any more."""
    after = getattr(batch, "seq_lens_cpu", None)
    if before is not None and after is not None and not torch.equal(before, after):
        text = f"the forward of step {batch.step} left lengths {after.tolist()} of {before.tolist()}"
        yield Violation("a forward leaves its batch's lengths alone", "seq_lens_cpu", text, batch.step)
    if batch.prefill_input_ids_cpu is not None:
        text = f"after the forward of step {batch.step} its batch has {len(batch.prefill_input_ids_cpu)} staged ids"
        yield Violation("a staged prompt is uploaded once", "prefill_input_ids_cpu", text, batch.step)


def _running(batch: ScheduleBatch, rows: torch.Tensor) -> Iterator[tuple[Request, int]]:
    for req, value in zip(batch.reqs, rows.tolist(), strict=True):
        if req.status is Status.RUNNING:
            yield req, value


def _unlike_device(
    batch: ScheduleBatch,
    name: str,
    field: str,
    mirror: torch.Tensor,
    peek: Peek,
    *,
    sentinels: bool = False,
) -> Iterator[Violation]:
    device = getattr(batch, field, None)
    if device is None:
        return
    pairs = zip(batch.reqs, peek(device).tolist(), mirror.tolist(), strict=True)
    for req, here, there in pairs:
        if here != there and not (sentinels and here < 0):
            yield Violation(
                "mirrors equal device values",
                field,
                f"{name}: {field} of request {req.id} is {here} on the device and {there} in {field}_cpu",
                batch.step,
                req.id,
            )


def _unlike_request(
    batch: ScheduleBatch, name: str, req: Request, field: str, mirror: int, value: int | None
) -> Iterator[Violation]:
    if mirror != value:
        yield Violation(
            "mirrors equal the requests' values",
            field,
            f"{name}: {field} is {mirror} for request {req.id}, which has {value}",
            batch.step,
            req.id,
        )


def _some(reqs: list[Request]) -> str:
    names = ", ".join(req.id for req in reqs[:3])
    return names if len(reqs) <= 3 else f"{names}, ..."
