"""The overlapped worker (upstream ``eagle_worker_v2``), which never waits for the device.

Every request has KV slots ahead of its length, so the host need not know how many drafts were accepted; the new lengths
are published between verify and draft extend, so that the next step can be scheduled meanwhile.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..batch import DraftInput, ExtendLens, ScheduleBatch, StepResult, draft_step, extend_step
from ..kernels.drafts import pick_bonus
from ..model.sampling_info import sampling_of
from .drafter import DraftRows, VerifiedChains
from .worker import Worker, count_accepted


class LengthPolicies(Protocol):
    """The relay's answers that a verify needs (``DraftPolicies``)."""

    def publish(self, batch: ScheduleBatch, lengths: torch.Tensor, /) -> None: ...

    def step_lens(self, batch: ScheduleBatch, count: int, /) -> ExtendLens: ...

    def draft_lengths(self, batch: ScheduleBatch, count: int, /) -> torch.Tensor: ...


def verify(worker: Worker, batch: ScheduleBatch, relay: LengthPolicies, result: StepResult) -> None:
    """One step of a batch whose slots are allocated ahead; ``batch.seq_lens`` does not count the bonus tokens. The
    first ``accept_lens[i]`` of the ``next_token_ids`` of request i are its tokens."""
    start, rows, lens = batch.draft_input, batch.req_pool_indices, batch.seq_lens
    observer, bound, b, d = worker.observer, batch.longest, batch.batch_size, worker.spec.draft_tokens
    at = DraftRows(rows, lens, bound)
    with observer.range("draft", draft_step(batch.step), b):
        tree = worker.drafter.draft(start, at)
    with observer.range("verify", batch.step, b * d):
        output = worker.verifier.forward(tree, at, None)
    with observer.range("sample", batch.step, b):
        info = sampling_of(batch)
        verdict = worker.verifier.predict(tree, output, info, lens)
        accepted = worker.acceptance.judge(tree, verdict.predict, rows, info)
        count_accepted(info, verdict.predict, accepted.places)
        new_lens = lens + accepted.lens
    with observer.range("publish", batch.step, b):
        relay.publish(batch, new_lens)
    with observer.range("draft_extend", extend_step(batch.step), b * d):
        step_lens = relay.step_lens(batch, d)
        ends = relay.draft_lengths(batch, d)
        behind = DraftRows(rows, ends, bound)
        state = worker.drafter.extend_chains(
            VerifiedChains(verdict.predict, verdict.hidden_states, accepted.lens, behind, step_lens)
        )
        bonus = pick_bonus(verdict.predict, accepted.lens)
    result.next_token_ids, result.accept_lens = verdict.predict, accepted.lens
    result.next_token_logprobs = verdict.logprobs
    result.draft_tokens = d
    result.next_draft_input = DraftInput(bonus, state, new_lens)
    result.extra_keep_alive_refs += [start, rows, lens, tree, verdict, accepted, step_lens, ends]
