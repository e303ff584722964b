"""The serial worker (upstream ``eagle_worker``): the accepted tokens are on the host before the draft goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..batch import DraftInput, ExtendLens, ScheduleBatch, StepResult, draft_step, extend_step
from ..kernels.drafts import write_rows
from ..memory.allocation import alloc_ahead, evict_from_tree_cache
from ..model.sampling_info import sampling_of
from ..request import Request
from .acceptance import Accepted
from .drafter import DraftRows, Tree, extend_batch
from .verifier import DraftVerdict
from .worker import Worker, count_accepted

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


def verify(
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
    ids = verdict.predict[index]
    forward = extend_batch(
        ids,
        rows,
        lens,
        slots[index],
        (extend_lens, prefix_lens),
        longest=batch.longest,
        most=max(extend),
    )
    state = worker.drafter.extend(forward, verdict.hidden_states[index])
    bonus = ids[torch.cumsum(extend_lens, 0) - 1]
    return DraftInput(bonus, state)
