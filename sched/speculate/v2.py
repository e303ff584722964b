"""The overlapped worker (upstream ``eagle_worker_v2``): no step of it waits for the device.

Every request has KV slots ahead of its length, so the host need not know how many drafts were accepted; the new lengths
are published between verify and draft extend, so that the next step can be scheduled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..batch import DraftInput, ScheduleBatch
from ..model.sampling_info import sampling_of
from .steps import draft_step, extend_step
from .worker import Worker, count_accepted


class OverlappedVerified(NamedTuple):
    """What a verify step leaves on the device."""

    predict: torch.Tensor  # [b · d] int64; the first accept_lens[i] of request i's are its tokens
    accept_lens: torch.Tensor  # [b] int32
    logprobs: torch.Tensor | None  # [b · d] float32, of ``predict``
    draft: DraftInput
    keep: list[object]  # read by forwards after the last name for it is gone


class Hooks(NamedTuple):
    """What the relay decides on the way."""

    publish: Callable[[ScheduleBatch, torch.Tensor], None]
    step_lens: Callable[[ScheduleBatch, int], tuple[torch.Tensor, torch.Tensor]]
    draft_lengths: Callable[[ScheduleBatch, int], torch.Tensor]


def verify(worker: Worker, batch: ScheduleBatch, hooks: Hooks) -> OverlappedVerified:
    """One step of a batch whose slots are allocated ahead; ``batch.seq_lens`` does not count the bonus tokens."""
    start, rows, lens = batch.spec_info, batch.req_pool_indices, batch.seq_lens
    assert start is not None and rows is not None and lens is not None
    observer, bound, b, d = worker.observer, batch.longest, batch.batch_size, worker.spec.draft_tokens
    with observer.range("draft", draft_step(batch.step), b):
        tree = worker.drafter.chain(start, rows, lens, bound)
    with observer.range("verify", batch.step, b * d):
        output = worker.verifier.forward(tree, rows, lens, None, bound)
    with observer.range("sample", batch.step, b):
        info = sampling_of(batch)
        verdict = worker.verifier.predict(tree, output, info, lens)
        accepted = worker.acceptance.judge(tree, verdict.predict, rows, info)
        count_accepted(info, verdict.predict, accepted.places)
        new_lens = lens + accepted.lens
    with observer.range("publish", batch.step, b):
        hooks.publish(batch, new_lens)
    with observer.range("draft_extend", extend_step(batch.step), b * d):
        step_lens = hooks.step_lens(batch, d)
        ends = hooks.draft_lengths(batch, d)
        extended = worker.drafter.extend_chain(
            verdict.predict, verdict.hidden_states, accepted.lens, rows, ends, step_lens, bound
        )
        bonus = worker.bonus(verdict.predict, accepted.lens)
    draft = DraftInput(bonus, *extended, new_seq_lens=new_lens)
    keep: list[object] = [start, rows, lens, tree, verdict, accepted, step_lens, ends]
    return OverlappedVerified(verdict.predict, accepted.lens, verdict.logprobs, draft, keep)
