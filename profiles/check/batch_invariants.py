"""Invariants of a batch between steps, and of a forward's inputs, token by token; what violates them.

Between steps a batch has one row per request and correct host mirrors. A forward's inputs are values in range,
positions, KV slots, and prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...sched.batch import ROW_FIELDS, ForwardBatch, ScheduleBatch
from ...sched.config import EngineConfig
from ...sched.relay.context import UNSTASHED, RelayContext
from ...sched.relay.row import RelayRow
from ...sched.request import Request, Status

# Reads a device tensor without any call that the device counts or orders.
Peek = Callable[[torch.Tensor], torch.Tensor]

PROMPTS = "prompts pass unchanged"


class Violation(NamedTuple):
    """``promise`` is the invariant in a few words, ``field`` the field of the batch or the buffer, ``says`` a
    sentence with the step or the request."""

    promise: str
    field: str
    says: str


class Violations:
    """The first violation of each promise and field, with the number of later ones: a defect may violate at each
    step."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], Violation] = {}
        self._count: dict[tuple[str, str], int] = {}

    def add(self, found: Iterable[Violation]) -> None:
        for violation in found:
            key = violation.promise, violation.field
            self._first.setdefault(key, violation)
            self._count[key] = self._count.get(key, 0) + 1

    def found(self) -> Sequence[Violation]:
        more = {key: f" (and {count - 1} more like it)" * (count > 1) for key, count in self._count.items()}
        return [found._replace(says=found.says + more[key]) for key, found in self._first.items()]


# ---- a batch between steps ---------------------------------------------------------------------------------------


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
            yield Violation("slots are allocated by the host's lengths", "seq_lens", text)


def row_counts(batch: ScheduleBatch, name: str) -> Iterator[Violation]:
    """An empty batch may have stale rows: it is never merged, so they are never read."""
    if batch.is_empty:
        return
    tensors = {field: getattr(batch, field, None) for field in ROW_FIELDS}
    odd = {f: len(t) for f, t in tensors.items() if t is not None and len(t) != batch.batch_size}
    if odd:
        rows = ", ".join(f"{field}: {count}" for field, count in odd.items())
        text = f"{name} has other rows than its {batch.batch_size} requests ({_some(batch.reqs)}): {rows}"
        yield Violation("a row for each request", next(iter(odd)), text)


def mirrors(
    batch: ScheduleBatch,
    name: str,
    peek: Peek,
    *,
    lengths: bool,
    sentinels: bool = False,
    settled: bool = True,
) -> Iterator[Violation]:
    """Compare device values with their host mirrors, and these with the requests, where each request has a row.
    ``lengths``: whether the device's lengths are compared. ``sentinels``: whether negative ones stand for lengths that
    the next forward looks up. ``settled``: whether the host's lengths are those of the requests."""
    odd = list(row_counts(batch, name))
    yield from odd
    if batch.is_empty or odd:
        return
    rows, lens = getattr(batch, "req_pool_indices_cpu", None), getattr(batch, "seq_lens_cpu", None)
    if rows is None:
        field = "req_pool_indices_cpu"
        yield Violation("mirrors equal device values", field, f"{name} has no {field}")
        return
    yield from _unlike_device(batch, name, "req_pool_indices", rows, peek)
    yield from _unlike_requests(batch, name, "req_pool_indices_cpu", "req_pool_idx")
    if lens is not None and lengths:
        yield from _unlike_device(batch, name, "seq_lens", lens, peek, sentinels=sentinels)
    if lens is not None and settled:
        yield from _unlike_requests(batch, name, "seq_lens_cpu", "kv_committed_len")


def untouched(batch: ScheduleBatch, before: torch.Tensor | None) -> Iterator[Violation]:
    """After a speculative forward, the batch's lengths are unchanged, and an uploaded prompt is not staged any more."""
    after = getattr(batch, "seq_lens_cpu", None)
    if before is not None and after is not None and not torch.equal(before, after):
        text = f"the forward of step {batch.step} left lengths {after.tolist()} of {before.tolist()}"
        yield Violation("a forward leaves its batch's lengths alone", "seq_lens_cpu", text)
    if batch.prefill_input_ids_cpu is not None:
        text = f"after the forward of step {batch.step} its batch has {len(batch.prefill_input_ids_cpu)} staged ids"
        yield Violation("a staged prompt is uploaded once", "prefill_input_ids_cpu", text)


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
            text = f"{name}: {field} of request {req.id} is {here} on the device and {there} in {field}_cpu"
            yield Violation("mirrors equal device values", field, text)


def _unlike_requests(batch: ScheduleBatch, name: str, field: str, attribute: str) -> Iterator[Violation]:
    for req, mirror in zip(batch.reqs, getattr(batch, field).tolist(), strict=True):
        value = getattr(req, attribute)
        if req.status is Status.RUNNING and mirror != value:
            text = f"{name}: {field} is {mirror} for request {req.id}, which has {value}"
            yield Violation("mirrors equal the requests' values", field, text)


def _some(reqs: list[Request]) -> str:
    names = ", ".join(req.id for req in reqs[:3])
    return names if len(reqs) <= 3 else f"{names}, ..."


# ---- the inputs of a forward --------------------------------------------------------------------------------------


class Token(NamedTuple):
    """One input token by the host's data."""

    request: Request
    row: int
    position: int
    prompt: bool  # part of a prompt, so that the host has its value


@dataclass(frozen=True, slots=True)
class Forward:
    """A resolved batch and the model's view of it. ``pages`` is the page table that the forward reads."""

    batch: ScheduleBatch
    view: ForwardBatch
    config: EngineConfig
    pages: torch.Tensor
    peek: Peek

    def tokens(self) -> Sequence[Token]:
        """The tokens in input order."""
        batch = self.batch
        rows, lens = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
        new = batch.extend_lens if batch.forward_mode.is_extend else [1] * batch.batch_size
        decoding = set(map(id, batch.decoding_reqs if batch.forward_mode.is_extend else batch.reqs))
        return [
            Token(req, row, position, id(req) not in decoding and position < req.seqlen)
            for req, row, length, count in zip(batch.reqs, rows, lens, new, strict=True)
            for position in range(length - count, length)
        ]

    def input_ids(self) -> list[int]:
        ids: list[int] = self.peek(self.view.input_ids).tolist()
        return ids

    def violation(self, promise: str, field: str, token: Token, text: str) -> Violation:
        sentence = f"step {self.batch.step}, request {token.request.id}, position {token.position}: {text}"
        return Violation(promise, field, sentence)


def forward_violations(forward: Forward) -> Iterator[Violation]:
    """The violations of a batch with one row per request."""
    tokens = forward.tokens()
    counts = list(_token_counts(forward, len(tokens)))
    yield from counts
    if not counts:
        yield from _lengths(forward)
        yield from _ids(forward, tokens)
        yield from _positions(forward, tokens)
        yield from _slots(forward, tokens)


def _token_counts(forward: Forward, count: int) -> Iterator[Violation]:
    step = forward.batch.step
    for field in ("input_ids", "positions", "out_cache_loc"):
        length = getattr(forward.view, field).shape[0]
        if length != count:
            text = f"step {step} has {count} tokens but {length} {field}"
            yield Violation("as many inputs as tokens", field, text)


def _lengths(forward: Forward) -> Iterator[Violation]:
    """The model's rows and lengths equal the host's, also if the relay made them anew."""
    batch, view = forward.batch, forward.view
    for field, mirror in (("seq_lens", batch.seq_lens_cpu), ("req_pool_indices", batch.req_pool_indices_cpu)):
        given = forward.peek(getattr(view, field)).tolist()
        for req, value, meant in zip(batch.reqs, given, mirror.tolist(), strict=True):
            if value != meant:
                text = (
                    f"step {batch.step}: the model is given {field} {value} for request {req.id}, not {meant}"
                )
                yield Violation("the model has the host's rows and lengths", field, text)
    # Kernels on the host read the lengths; those of a GPU rely on the bounds.
    bounds = {"max_seq_len": view.seq_lens, "max_extend_len": view.extend_lens}
    for field, lengths in bounds.items():
        longest = 0 if lengths is None else max(forward.peek(lengths).tolist(), default=0)
        if getattr(view, field) < longest:
            text = f"step {batch.step}: {field} is {getattr(view, field)}, less than a length of {longest}"
            yield Violation("the host's bounds hold all lengths", field, text)


def _ids(forward: Forward, tokens: Sequence[Token]) -> Iterator[Violation]:
    vocabulary = forward.config.vocab_size
    for token, value in zip(tokens, forward.input_ids(), strict=True):
        if token.prompt:
            [meant] = token.request.tokens(token.position, token.position + 1)
            if value != meant:
                text = f"the prompt's token is {value}, not {meant}"
                yield forward.violation(PROMPTS, "input_ids", token, text)
        elif value == UNSTASHED:
            text = f"row {token.row} of the relay was gathered before a token was stashed there"
            yield forward.violation("no row is gathered unstashed", "output_tokens_buf", token, text)
        elif not 0 <= value < vocabulary:
            text = (
                f"the input token from row {token.row} of the relay is {value}, outside of [0, {vocabulary})"
            )
            yield forward.violation("inputs are tokens", "input_ids", token, text)


def _positions(forward: Forward, tokens: Sequence[Token]) -> Iterator[Violation]:
    for token, value in zip(tokens, forward.peek(forward.view.positions).tolist(), strict=True):
        if value != token.position:
            yield forward.violation(
                "positions follow from lengths", "positions", token, f"its position is given as {value}"
            )


def _slots(forward: Forward, tokens: Sequence[Token]) -> Iterator[Violation]:
    """Each token's KV is written to the slot that its row of the page table has."""
    end = forward.config.logical_tokens + forward.config.page_size
    table = forward.peek(forward.pages)
    writers: dict[int, Token] = {}
    for token, slot in zip(tokens, forward.peek(forward.view.out_cache_loc).tolist(), strict=True):
        listed = int(table[token.row, token.position])
        other = writers.setdefault(slot, token)
        if not 0 < slot < end:
            text = f"its KV goes to slot {slot}, outside of [1, {end})"
            yield forward.violation("slots are in the pool", "out_cache_loc", token, text)
        elif other is not token:
            text = f"its KV goes to slot {slot}, and so does that of request {other.request.id}"
            yield forward.violation("a slot has one writer", "out_cache_loc", token, text)
        elif listed != slot:
            text = f"its KV goes to slot {slot}, but row {token.row} of the page table has slot {listed}"
            yield forward.violation("KV is found again", "req_to_token", token, text)
