"""Invariants of a forward's inputs, token by token: values in range, positions, KV slots, and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...sched.batch import ForwardBatch, ScheduleBatch
from ...sched.config import EngineConfig
from ...sched.relay.context import UNSTASHED
from ...sched.request import Request
from .batch_invariants import Peek
from .violations import Violation

PROMPTS = "prompts pass unchanged"


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
        return Violation(promise, field, sentence, self.batch.step, token.request.id)


def violations(forward: Forward) -> Iterator[Violation]:
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
            yield Violation("as many inputs as tokens", field, text, step)


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
                yield Violation("the model has the host's rows and lengths", field, text, batch.step, req.id)


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
