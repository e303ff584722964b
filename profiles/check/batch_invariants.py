"""A batch between steps: as many rows as requests, and host mirrors that tell the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...sched.batch import ScheduleBatch
from ...sched.relay.lengths import allocate_by_batch_lengths
from ...sched.relay.row import RelayRow
from ...sched.request import Request, Status
from .violations import Violation

Peek = Callable[[torch.Tensor], torch.Tensor]
"""Reads a device tensor without the device knowing."""

_ROWS = ("req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "orig_seq_lens")


def keeps_lengths(row: RelayRow) -> bool:
    """Whether a row's device lengths are lengths between forwards too: then the schedule allocates by them."""
    return row.allocation_lengths is allocate_by_batch_lengths


def row_counts(batch: ScheduleBatch, name: str) -> Iterator[Violation]:
    """A batch of nobody may keep stale rows: it must not be merged, and then nobody sees them."""
    if batch.is_empty:
        return
    tensors = {field: getattr(batch, field, None) for field in _ROWS}
    odd = {f: len(t) for f, t in tensors.items() if t is not None and len(t) != batch.batch_size}
    if odd:
        rows = ", ".join(f"{field}: {count}" for field, count in odd.items())
        text = f"{name} has other rows than its {batch.batch_size} requests ({_some(batch.reqs)}): {rows}"
        yield Violation("a row for each request", next(iter(odd)), text, batch.step)


def mirrors(
    batch: ScheduleBatch, name: str, peek: Peek, *, lengths: bool, settled: bool = True
) -> Iterator[Violation]:
    """Device values against their mirrors on the host, and those against what the requests themselves say. ``lengths``:
    the device's lengths are lengths just now; ``settled``: the host's are those of the requests."""
    if batch.is_empty or any(True for _ in row_counts(batch, name)):
        return
    rows, lens = getattr(batch, "req_pool_indices_cpu", None), getattr(batch, "seq_lens_cpu", None)
    if rows is None:
        field = "req_pool_indices_cpu"
        yield Violation("mirrors equal device values", field, f"{name} has no {field}", batch.step)
        return
    yield from _apart(batch, name, "req_pool_indices", rows, peek)
    for req, row in _running(batch, rows):
        yield from _untrue(batch, name, req, "req_pool_indices_cpu", row, req.req_pool_idx)
    if lens is not None and lengths:
        yield from _apart(batch, name, "seq_lens", lens, peek)
    if lens is not None and settled:
        for req, length in _running(batch, lens):
            yield from _untrue(batch, name, req, "seq_lens_cpu", length, req.kv_committed_len)


def untouched(batch: ScheduleBatch, before: torch.Tensor | None) -> Iterator[Violation]:
    """After a speculative forward: the batch is what it was, and a prompt that was uploaded is no longer staged."""
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


def _apart(
    batch: ScheduleBatch, name: str, field: str, mirror: torch.Tensor, peek: Peek
) -> Iterator[Violation]:
    device = getattr(batch, field, None)
    if device is None:
        return
    pairs = zip(batch.reqs, peek(device).tolist(), mirror.tolist(), strict=True)
    for req, here, there in pairs:
        if here != there:
            yield Violation(
                "mirrors equal device values",
                field,
                f"{name}: {field} of request {req.id} is {here} on the device and {there} in {field}_cpu",
                batch.step,
                req.id,
            )


def _untrue(
    batch: ScheduleBatch, name: str, req: Request, field: str, told: int, true: int | None
) -> Iterator[Violation]:
    if told != true:
        yield Violation(
            "mirrors tell the truth",
            field,
            f"{name}: {field} says {told} of request {req.id}, which has {true}",
            batch.step,
            req.id,
        )


def _some(reqs: list[Request]) -> str:
    names = ", ".join(req.id for req in reqs[:3])
    return names if len(reqs) <= 3 else f"{names}, ..."
