"""The serial worker (upstream ``eagle_worker``): the host learns what was accepted before the draft goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..batch import DraftInput, ScheduleBatch
from ..kernels.drafts import write_rows
from ..memory.allocation import alloc_ahead, evict_from_tree_cache
from ..model.sampling_info import sampling_of
from ..request import Request
from .acceptance import Accepted
from .drafter import Tree, extend_batch
from .steps import draft_step, extend_step
from .verifier import DraftVerdict
from .worker import Worker, count_accepted

# Gives a request its tokens; returns how many it took, and whether it goes on.
Take = Callable[[Request, Sequence[int], Sequence[float]], tuple[int, bool]]
Lens = Callable[[Sequence[int], Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


class SerialVerified(NamedTuple):
    tokens: torch.Tensor  # flat: what each request took, one after the other
    accept_lens: list[int]  # as verified: an ending may have cut them
    draft: DraftInput | None  # of the requests that go on; None when there is none


@dataclass(frozen=True, slots=True)
class _Taken:
    """What is left of a verdict once the requests have had their tokens."""

    index: torch.Tensor  # [sum of lens] int64, places among the drafts
    lens: list[int]  # of every request
    accept_lens: list[int]
    before: list[int]  # lengths before
    going_on: list[int]  # places in the batch


def verify(worker: Worker, batch: ScheduleBatch, take: Take, lens_of: Lens) -> SerialVerified:
    """One step. ``batch.seq_lens`` and its mirror grow in place; slots of what was not accepted are freed."""
    observer, b = worker.observer, batch.batch_size
    with observer.range("draft", draft_step(batch.step), b):
        tree = _draft(worker, batch)
    with observer.range("verify", batch.step, b * worker.spec.draft_tokens):
        slots = _place(worker, batch, worker.spec.draft_tokens)
        rows, lens = _rows_of(batch)
        output = worker.verifier.forward(tree, rows, lens, slots, batch.longest)
    with observer.range("sample", batch.step, b):
        info = sampling_of(batch)
        verdict = worker.verifier.predict(tree, output, info, lens)
        accepted = worker.acceptance.judge(tree, verdict.predict, rows, info)
    with observer.range("publish", batch.step, b):
        taken = _take(batch, verdict, accepted, take)
        count_accepted(info, verdict.predict, accepted.places)
        _compact(worker, batch, accepted, taken, slots)
    with observer.range("draft_extend", extend_step(batch.step), b):
        draft = _extend(worker, batch, verdict, accepted, taken, slots, lens_of)
    return SerialVerified(verdict.predict[taken.index], taken.accept_lens, draft)


def _rows_of(batch: ScheduleBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.req_pool_indices, batch.seq_lens


def _draft(worker: Worker, batch: ScheduleBatch) -> Tree:
    rows, lens = _rows_of(batch)
    torch.sum(lens).item()  # upstream's attention wants the sum
    allocator, spec = worker.cache.token_to_kv_pool_allocator, worker.spec
    pages = batch.batch_size * (-(-spec.alloc_len // allocator.page_size) + 1)
    evict_from_tree_cache(worker.cache, pages * allocator.page_size)
    state = allocator.backup_state()
    _place(worker, batch, spec.drafts)
    allocator.restore_state(state)  # the rows know the slots, and only this step uses them
    assert batch.spec_info is not None
    grow = worker.drafter.chain if spec.topk == 1 else worker.drafter.tree
    return grow(batch.spec_info, rows, lens, batch.longest)


def _place(worker: Worker, batch: ScheduleBatch, count: int) -> torch.Tensor:
    """Slots [b · count] int64 behind each request's length, written to its row."""
    rows, lens = _rows_of(batch)
    slots = alloc_ahead(
        worker.cache,
        req_pool_indices=rows,
        starts=lens,
        ends=lens + count,
        starts_cpu=batch.seq_lens_cpu,
        ends_cpu=batch.seq_lens_cpu + count,
    )
    table = worker.cache.req_to_token_pool.req_to_token
    write_rows(table, rows, lens, torch.full_like(lens, count), slots)
    return slots


def _take(batch: ScheduleBatch, verdict: DraftVerdict, accepted: Accepted, take: Take) -> _Taken:
    """Bring the verdict to the host and give every request its tokens, as far as it wants them."""
    index: list[list[int]] = accepted.places.tolist()
    predict: list[int] = verdict.predict.tolist()
    accept_lens: list[int] = accepted.lens.cpu().tolist()
    logprobs: list[float] = [] if verdict.logprobs is None else verdict.logprobs.tolist()
    lens, going_on = [], []
    for i, (req, places) in enumerate(zip(batch.reqs, index, strict=True)):
        walked = places[: accept_lens[i]]
        count, goes_on = take(
            req, [predict[place] for place in walked], [logprobs[place] for place in walked if logprobs]
        )
        lens.append(count)
        if goes_on:
            going_on.append(i)
        if count < len(walked):
            accepted.places[i, count:].fill_(-1)
    flat = accepted.places[accepted.places != -1].to(torch.int64)
    return _Taken(flat, lens, accept_lens, batch.seq_lens_cpu.tolist(), going_on)


def _compact(
    worker: Worker, batch: ScheduleBatch, accepted: Accepted, taken: _Taken, slots: torch.Tensor
) -> None:
    """Free the slots of what was not accepted, close the gaps in the rows, and let the lengths grow."""
    rows, lens = _rows_of(batch)
    kept = (accepted.places != -1).sum(1)
    worker.cache.token_to_kv_pool_allocator.free(slots[_evicted(worker, lens, kept, taken.index)])
    table = worker.cache.req_to_token_pool.req_to_token
    write_rows(table, rows, lens, kept, slots[taken.index])
    lens.add_(kept)
    batch.seq_lens_cpu.add_(torch.tensor(taken.lens))
    for req, before, count in zip(batch.reqs, taken.before, taken.lens, strict=True):
        req.kv_committed_len = req.kv_allocated_len = before + count


def _evicted(worker: Worker, lens: torch.Tensor, kept: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[b · d] bool. With pages: whole ones that nothing accepted lies in; the next step fills up the others."""
    page, d = worker.cache.page_size, worker.spec.draft_tokens
    if page == 1:
        return torch.ones(lens.shape[0] * d, dtype=torch.bool, device=lens.device).index_fill_(
            0, index, value=False
        )
    first = ((lens + kept + page - 1) // page * page).unsqueeze(1)
    return (lens.unsqueeze(1) + torch.arange(d, device=lens.device) >= first).flatten()


def _extend(
    worker: Worker,
    batch: ScheduleBatch,
    verdict: DraftVerdict,
    accepted: Accepted,
    taken: _Taken,
    slots: torch.Tensor,
    lens_of: Lens,
) -> DraftInput | None:
    """Teach the draft what requests that go on have accepted."""
    if not taken.going_on:
        return None
    rows, lens = _rows_of(batch)
    index = taken.index
    if len(taken.going_on) < batch.batch_size:
        unfinished = torch.tensor(taken.going_on, dtype=torch.int64, device=rows.device)
        rows, lens = rows[unfinished], lens[unfinished]
        index = torch.cat([accepted.places[i, : taken.lens[i]] for i in taken.going_on]).to(torch.int64)
    extend = [taken.lens[i] for i in taken.going_on]
    extend_lens, prefix_lens = lens_of(extend, [taken.before[i] for i in taken.going_on])
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
    extended = worker.drafter.extend(forward, verdict.hidden_states[index])
    bonus = ids[torch.cumsum(extend_lens, 0) - 1]
    return DraftInput(bonus, *extended)
