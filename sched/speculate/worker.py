"""The two workers of speculation: how each verifies drafts, and what they share.

The serial worker (upstream ``eagle_worker``) has the accepted tokens on the host before the draft goes on. The
overlapped worker (upstream ``eagle_worker_v2``) never waits for the device: every request has KV slots ahead of its
length, so the host need not know how many drafts were accepted; the new lengths are published between verify and draft
extend, so that the next step can be scheduled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..batch import (
    DraftInput,
    DraftState,
    ExtendLens,
    ForwardBatch,
    ForwardMode,
    ModelOutput,
    ScheduleBatch,
    StepResult,
    draft_step,
    extend_step,
)
from ..config import SpeculativeConfig
from ..kernels.drafts import pick_bonus, write_rows
from ..kernels.rows import extend_positions
from ..memory.allocation import alloc_ahead, evict_from_tree_cache
from ..memory.cache import PrefixCache
from ..memory.pools import KVPool
from ..model.sampling import SamplingInfo, sampling_of
from ..observe import Observer
from ..request import Request
from .drafter import DraftRows, Tree, VerifiedChains
from .verifier import Acceptance, Accepted, DraftVerdict


class DraftRunner(Protocol):
    """Runs the draft model (``Drafter``)."""

    def draft(self, start: DraftInput, at: DraftRows) -> Tree: ...

    def extend(self, batch: ForwardBatch, hidden_states: torch.Tensor) -> DraftState: ...

    def extend_chains(self, chains: VerifiedChains) -> DraftState: ...


class VerifyRunner(Protocol):
    """Runs the target model over drafts (``Verifier``)."""

    def forward(self, tree: Tree, at: DraftRows, slots: torch.Tensor | None) -> ModelOutput: ...

    def predict(
        self, tree: Tree, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor
    ) -> DraftVerdict: ...


@dataclass(frozen=True, slots=True)
class Worker:
    spec: SpeculativeConfig
    drafter: DraftRunner
    verifier: VerifyRunner
    acceptance: Acceptance
    cache: PrefixCache
    observer: Observer
    kv: KVPool | None = None  # the draft's own, where it has a model


def count_accepted(info: SamplingInfo, predict: torch.Tensor, index: torch.Tensor) -> None:
    """Count the tokens ``predict`` [b · d] at the places ``index`` [b, most] in exact penalties."""
    orchestrator = info.penalizer_orchestrator
    if orchestrator is None or not orchestrator.is_required or not orchestrator.exact:
        return
    tokens = predict[index.clamp(min=0).to(torch.int64)]
    orchestrator.count_accepted(torch.where(index >= 0, tokens, -1))


# Appends a verify's tokens to a request; returns how many it kept, and whether it goes on.
AppendTokens = Callable[[Request, Sequence[int], Sequence[float]], tuple[int, bool]]
# Brings the new tokens' and the prefixes' counts to the device.
UploadLens = Callable[[Sequence[int], Sequence[int]], ExtendLens]


@dataclass(frozen=True, slots=True)
class _KeptTokens:
    """What the requests of a batch have kept of a verdict: an ending may have cut what was accepted."""

    index: torch.Tensor  # [sum of lens] int64, places among the drafts
    lens: list[int]  # of every request
    before: list[int]  # lengths before
    going_on: list[int]  # places in the batch


def verify_serial(
    worker: Worker, batch: ScheduleBatch, append: AppendTokens, upload_lens: UploadLens, result: StepResult
) -> None:
    """One step. ``batch.seq_lens`` and its mirror grow in place; slots of what was not accepted are freed. The result's
    tokens are what each request kept, one request after the other; it has the draft input of the requests that go on,
    None when there is none."""
    observer, b = worker.observer, batch.batch_size
    at = DraftRows(batch.req_pool_indices, batch.seq_lens, batch.longest)
    with observer.range("draft", draft_step(batch.step), b):
        tree = _draft(worker, batch, at)
    with observer.range("verify", batch.step, b * worker.spec.draft_tokens):
        slots = _place(worker, batch, worker.spec.draft_tokens)
        output = worker.verifier.forward(tree, at, slots)
    with observer.range("sample", batch.step, b):
        info = sampling_of(batch)
        verdict = worker.verifier.predict(tree, output, info, at.seq_lens)
        accepted = worker.acceptance.judge(tree, verdict.predict, at.rows, info)
    with observer.range("publish", batch.step, b):
        kept = _append(batch, verdict, accepted, append)
        count_accepted(info, verdict.predict, accepted.places)
        _compact(worker, batch, accepted, kept, slots)
    with observer.range("draft_extend", extend_step(batch.step), b):
        result.next_draft_input = _extend(worker, batch, verdict, accepted, kept, slots, upload_lens)
    result.next_token_ids = verdict.predict[kept.index]


def _draft(worker: Worker, batch: ScheduleBatch, at: DraftRows) -> Tree:
    torch.sum(at.seq_lens).item()  # upstream's attention needs the sum
    allocator, spec = worker.cache.token_to_kv_pool_allocator, worker.spec
    pages = batch.batch_size * (-(-spec.alloc_len // allocator.page_size) + 1)
    evict_from_tree_cache(worker.cache, pages * allocator.page_size)
    state = allocator.backup_state()
    _place(worker, batch, spec.drafts)
    allocator.restore_state(state)  # the rows hold the slots, and only this step uses them
    return worker.drafter.draft(batch.draft_input, at)


def _place(worker: Worker, batch: ScheduleBatch, count: int) -> torch.Tensor:
    """Slots [b · count] int64 behind each request's length, written to its row."""
    rows, lens = batch.req_pool_indices, batch.seq_lens
    slots = alloc_ahead(
        worker.cache,
        rows,
        on_device=(lens, lens + count),
        on_host=(batch.seq_lens_cpu, batch.seq_lens_cpu + count),
    )
    table = worker.cache.req_to_token_pool.req_to_token
    write_rows(table, rows, lens, torch.full_like(lens, count), slots)
    return slots


def _append(
    batch: ScheduleBatch, verdict: DraftVerdict, accepted: Accepted, append: AppendTokens
) -> _KeptTokens:
    """Bring the verdict to the host and append its tokens to every request, up to the request's end."""
    index: list[list[int]] = accepted.places.tolist()
    predict: list[int] = verdict.predict.tolist()
    accept_lens: list[int] = accepted.lens.cpu().tolist()
    logprobs: list[float] = [] if verdict.logprobs is None else verdict.logprobs.tolist()
    lens, going_on = [], []
    for i, (req, places) in enumerate(zip(batch.reqs, index, strict=True)):
        walked = places[: accept_lens[i]]
        count, goes_on = append(
            req, [predict[place] for place in walked], [logprobs[place] for place in walked if logprobs]
        )
        lens.append(count)
        if goes_on:
            going_on.append(i)
        if count < len(walked):
            accepted.places[i, count:].fill_(-1)
    flat = accepted.places[accepted.places != -1].to(torch.int64)
    return _KeptTokens(flat, lens, batch.seq_lens_cpu.tolist(), going_on)


def _compact(
    worker: Worker, batch: ScheduleBatch, accepted: Accepted, kept: _KeptTokens, slots: torch.Tensor
) -> None:
    """Free the slots of what was not accepted, close the gaps in the rows, and let the lengths grow."""
    rows, lens = batch.req_pool_indices, batch.seq_lens
    counts = (accepted.places != -1).sum(1)
    worker.cache.token_to_kv_pool_allocator.free(slots[_evicted(worker, lens, counts, kept.index)])
    table = worker.cache.req_to_token_pool.req_to_token
    write_rows(table, rows, lens, counts, slots[kept.index])
    lens.add_(counts)
    batch.seq_lens_cpu.add_(torch.tensor(kept.lens))
    for req, before, count in zip(batch.reqs, kept.before, kept.lens, strict=True):
        req.kv_committed_len = req.kv_allocated_len = before + count


def _evicted(worker: Worker, lens: torch.Tensor, counts: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[b · d] bool: slots to free. With pages these are whole pages without an accepted token; the next step fills up
    the others."""
    page, d = worker.cache.page_size, worker.spec.draft_tokens
    if page == 1:
        return torch.ones(lens.shape[0] * d, dtype=torch.bool, device=lens.device).index_fill_(
            0, index, value=False
        )
    first = ((lens + counts + page - 1) // page * page).unsqueeze(1)
    return (lens.unsqueeze(1) + torch.arange(d, device=lens.device) >= first).flatten()


def _extend(
    worker: Worker,
    batch: ScheduleBatch,
    verdict: DraftVerdict,
    accepted: Accepted,
    kept: _KeptTokens,
    slots: torch.Tensor,
    upload_lens: UploadLens,
) -> DraftInput | None:
    """Run the draft over the tokens that requests have kept, of those that go on."""
    if not kept.going_on:
        return None
    rows, lens = batch.req_pool_indices, batch.seq_lens
    index = kept.index
    if len(kept.going_on) < batch.batch_size:
        unfinished = torch.tensor(kept.going_on, dtype=torch.int64, device=rows.device)
        rows, lens = rows[unfinished], lens[unfinished]
        index = torch.cat([accepted.places[i, : kept.lens[i]] for i in kept.going_on]).to(torch.int64)
    extend = [kept.lens[i] for i in kept.going_on]
    extend_lens, prefix_lens = upload_lens(extend, [kept.before[i] for i in kept.going_on])
    ids, places = verdict.predict[index], slots[index]
    forward = ForwardBatch(
        mode=ForwardMode.DRAFT_EXTEND,
        input_ids=ids,
        positions=extend_positions(lens, extend_lens, ids.shape[0]),
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=places,
        max_seq_len=batch.longest,
        extend_lens=extend_lens,
        extend_prefix_lens=prefix_lens,
        max_extend_len=max(extend),
    )
    state = worker.drafter.extend(forward, verdict.hidden_states[index])
    bonus = ids[torch.cumsum(extend_lens, 0) - 1]
    return DraftInput(bonus, state)


class LengthPolicies(Protocol):
    """The relay's answers that a verify needs (``DraftPolicies``)."""

    def publish(self, batch: ScheduleBatch, lengths: torch.Tensor, /) -> None: ...

    def step_lens(self, batch: ScheduleBatch, count: int, /) -> ExtendLens: ...

    def draft_lengths(self, batch: ScheduleBatch, count: int, /) -> torch.Tensor: ...


def verify_overlapped(
    worker: Worker, batch: ScheduleBatch, relay: LengthPolicies, result: StepResult
) -> None:
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
