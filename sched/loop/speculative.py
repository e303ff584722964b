"""One step under speculation: a prompt for both models, or draft, verify and draft extend.

The serial worker (upstream ``eagle_worker``) has the accepted tokens on the host before the draft goes on. The
overlapped worker (upstream ``eagle_worker_v2``) never waits for the device: every request has KV slots ahead of its
length, so the host need not know how many drafts were accepted; the new lengths are published between verify and draft
extend, so that the next step can be scheduled meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..batch import (
    DraftInput,
    ForwardBatch,
    ForwardMode,
    ScheduleBatch,
    StepResult,
    VerifiedTokens,
    draft_step,
    extend_step,
)
from ..kernels.drafts import pick_bonus, write_rows
from ..kernels.rows import extend_positions
from ..memory.allocation import alloc_ahead, evict_from_tree_cache
from ..model.sampling import SamplingInfo, sampling_of
from ..relay.row import DraftRelay
from ..speculate.drafter import DraftRows, Tree, VerifiedChains
from ..speculate.verifier import Accepted, DraftVerdict
from ..speculate.worker import Worker
from .engine import Engine
from .launch import make_forward_batch, sample_forward
from .settle import take_tokens


def launch_drafts(engine: Engine, batch: ScheduleBatch, *, overlapped: bool) -> StepResult:
    """As ``launch_step``: overlapped by the overlapped worker alone, otherwise by either worker."""
    relay, drafts, worker = engine.relay, engine.relay.drafts, engine.worker
    assert drafts is not None and worker is not None
    result = StepResult(next_token_ids=None, future_indices=relay.open(batch))
    with engine.observer.range("lengths", batch.step, batch.batch_size):
        drafts.host_lengths(batch)
    with relay.isolate(batch):
        _run(engine, worker, drafts, batch, result)
        with engine.observer.range("publish", extend_step(batch.step), batch.batch_size):
            # An idle step has no input of a next draft, nor has a verify that ended every request.
            if result.next_draft_input is not None:
                drafts.stash(result.future_indices, result.next_draft_input)
        if overlapped:
            with engine.observer.range("copy", batch.step, batch.batch_size):
                _start_copies(engine, result)
        relay.keep_alive(batch, result)
    if overlapped:
        relay.reads_done(batch)
    drafts.conclude(batch, result)
    return result


def awaits_grammar(batch: ScheduleBatch) -> bool:
    """Whether the previous step has to be settled first, because a verify's vocabulary mask depends on its tokens."""
    verifies = batch.forward_mode.is_decode and batch.spec_info is not None
    return verifies and sampling_of(batch).needs.grammar


def _run(
    engine: Engine, worker: Worker, drafts: DraftRelay, batch: ScheduleBatch, result: StepResult
) -> None:
    if batch.forward_mode.is_idle:  # nothing is drafted or verified
        drafts.publish(batch, batch.seq_lens)
        result.next_token_ids = batch.input_ids
    elif batch.forward_mode.is_extend:
        _prefill(engine, worker, drafts, batch, result)
    elif worker.spec.mode == "v1":
        _verify_serially(engine, worker, drafts, batch, result)
    else:
        _verify_overlapped(engine, worker, drafts, batch, result)


def _prefill(
    engine: Engine, worker: Worker, drafts: DraftRelay, batch: ScheduleBatch, result: StepResult
) -> None:
    """Run a prompt through the target, then its tokens from the second on, with the sampled ones behind them, through
    the draft."""
    with engine.observer.range("model", batch.step, batch.num_tokens):
        forward = make_forward_batch(engine, batch)
        forward.capture_hidden = True
        output = engine.runner.forward(forward)
    sampled = sample_forward(engine, batch, output)
    drafts.publish(batch, batch.seq_lens)
    with engine.observer.range("draft_extend", extend_step(batch.step), batch.num_tokens):
        assert forward.extend_lens is not None and forward.extend_prefix_lens is not None
        rotated = drafts.rotate(batch, sampled.token_ids, forward.extend_lens)
        lens = drafts.prompt_lens(batch, (forward.extend_lens, forward.extend_prefix_lens))
        worker.acceptance.begin(forward.req_pool_indices, batch.reqs)
        prompt = replace(
            forward,
            mode=ForwardMode.DRAFT_EXTEND,
            input_ids=rotated,
            positions=extend_positions(forward.seq_lens, lens[0], rotated.shape[0]),
            extend_lens=lens[0],
            extend_prefix_lens=lens[1],
        )
        assert output.hidden_states is not None
        state = worker.drafter.extend(prompt, output.hidden_states)
    result.next_token_ids, result.next_token_logprobs = sampled
    result.next_draft_input = DraftInput(sampled.token_ids, state, batch.seq_lens)
    result.extra_keep_alive_refs += [forward, output, rotated, lens]


def _start_copies(engine: Engine, result: StepResult) -> None:
    """Start copying the token ids to the host, and for a verify how many of them are accepted."""
    result.next_token_ids_cpu = _copied(result.next_token_ids)
    result.accept_lens = _copied(result.accept_lens)
    result.next_token_logprobs = _copied(result.next_token_logprobs)
    if engine.config.capabilities.events:
        result.copy_done = engine.streams.module.Event()
        result.copy_done.record()


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to("cpu", non_blocking=True)


# ---- the two verifies ------------------------------------------------------------------------------------------


def _count_accepted(info: SamplingInfo, predict: torch.Tensor, index: torch.Tensor) -> None:
    """Count the tokens ``predict`` [b · d] at the places ``index`` [b, most] in exact penalties."""
    orchestrator = info.penalizer_orchestrator
    if orchestrator is None or not orchestrator.is_required or not orchestrator.exact:
        return
    tokens = predict[index.clamp(min=0).to(torch.int64)]
    orchestrator.count_accepted(torch.where(index >= 0, tokens, -1))


@dataclass(frozen=True, slots=True)
class _KeptTokens:
    """What the requests of a batch have kept of a verdict: an ending may have cut what was accepted."""

    index: torch.Tensor  # [sum of lens] int64, places among the drafts
    lens: list[int]  # of every request
    before: list[int]  # lengths before
    going_on: list[int]  # places in the batch


def _verify_serially(
    engine: Engine, worker: Worker, drafts: DraftRelay, batch: ScheduleBatch, result: StepResult
) -> None:
    """Requests have their tokens when this returns; ``settle`` announces them and ends those that are done.
    ``batch.seq_lens`` and its mirror grow in place; slots of what was not accepted are freed. The result's tokens are
    what each request kept, one request after the other; it has the draft input of the requests that go on, None when
    there is none."""
    observer, b = engine.observer, batch.batch_size
    at = DraftRows(batch.req_pool_indices, batch.seq_lens, batch.longest)
    with observer.range("draft", draft_step(batch.step), b):
        tree = _draft(engine, worker, batch, at)
    with observer.range("verify", batch.step, b * worker.spec.draft_tokens):
        slots = _place(engine, batch, worker.spec.draft_tokens)
        output = worker.verifier.forward(tree, at, slots)
    with observer.range("sample", batch.step, b):
        info = sampling_of(batch)
        verdict = worker.verifier.predict(tree, output, info, at.seq_lens)
        accepted = worker.acceptance.judge(tree, verdict.predict, at.rows, info)
    with observer.range("publish", batch.step, b):
        kept = _append(engine, batch, verdict, accepted, result)
        _count_accepted(info, verdict.predict, accepted.places)
        _compact(engine, worker, batch, accepted, kept, slots)
    with observer.range("draft_extend", extend_step(batch.step), b):
        result.next_draft_input = _extend(worker, drafts, batch, verdict, accepted, kept, slots)
    result.next_token_ids = verdict.predict[kept.index]


def _draft(engine: Engine, worker: Worker, batch: ScheduleBatch, at: DraftRows) -> Tree:
    torch.sum(at.seq_lens).item()  # upstream's attention needs the sum
    allocator, spec = engine.allocator, worker.spec
    pages = batch.batch_size * (-(-spec.alloc_len // allocator.page_size) + 1)
    evict_from_tree_cache(engine.cache, pages * allocator.page_size)
    free_pages = allocator.free_pages
    _place(engine, batch, spec.drafts)
    allocator.free_pages = free_pages  # the rows hold the slots, and only this step uses them
    return worker.drafter.draft(batch.draft_input, at)


def _place(engine: Engine, batch: ScheduleBatch, count: int) -> torch.Tensor:
    """Slots [b · count] int64 behind each request's length, written to its row."""
    rows, lens = batch.req_pool_indices, batch.seq_lens
    slots = alloc_ahead(
        engine.cache,
        rows,
        on_device=(lens, lens + count),
        on_host=(batch.seq_lens_cpu, batch.seq_lens_cpu + count),
    )
    write_rows(engine.slots.req_to_token, rows, lens, torch.full_like(lens, count), slots)
    return slots


def _append(
    engine: Engine, batch: ScheduleBatch, verdict: DraftVerdict, accepted: Accepted, result: StepResult
) -> _KeptTokens:
    """Bring the verdict to the host and append its tokens to every request, up to the request's end."""
    index: list[list[int]] = accepted.places.tolist()
    predict: list[int] = verdict.predict.tolist()
    accept_lens: list[int] = accepted.lens.cpu().tolist()
    logprobs: list[float] = [] if verdict.logprobs is None else verdict.logprobs.tolist()
    result.verified = []
    for i, (req, places) in enumerate(zip(batch.reqs, index, strict=True)):
        walked = places[: accept_lens[i]]
        scores = [logprobs[place] for place in walked if logprobs]
        count, ending = take_tokens(engine, req, [predict[place] for place in walked], scores)
        result.verified.append(VerifiedTokens(len(walked), count, ending))
        if count < len(walked):
            accepted.places[i, count:].fill_(-1)
    flat = accepted.places[accepted.places != -1].to(torch.int64)
    lens = [entry.kept for entry in result.verified]
    going_on = [i for i, entry in enumerate(result.verified) if entry.ending is None]
    return _KeptTokens(flat, lens, batch.seq_lens_cpu.tolist(), going_on)


def _compact(
    engine: Engine,
    worker: Worker,
    batch: ScheduleBatch,
    accepted: Accepted,
    kept: _KeptTokens,
    slots: torch.Tensor,
) -> None:
    """Free the slots of what was not accepted, close the gaps in the rows, and let the lengths grow."""
    rows, lens = batch.req_pool_indices, batch.seq_lens
    counts = (accepted.places != -1).sum(1)
    d = worker.spec.draft_tokens
    engine.allocator.free(slots[_evicted(engine.config.page_size, d, lens, counts, kept.index)])
    write_rows(engine.slots.req_to_token, rows, lens, counts, slots[kept.index])
    lens.add_(counts)
    batch.seq_lens_cpu.add_(torch.tensor(kept.lens))
    for req, before, count in zip(batch.reqs, kept.before, kept.lens, strict=True):
        req.kv_committed_len = req.kv_allocated_len = before + count


def _evicted(
    page: int, d: int, lens: torch.Tensor, counts: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """[b · d] bool: slots to free. With pages these are whole pages without an accepted token; the next step fills up
    the others."""
    if page == 1:
        return torch.ones(lens.shape[0] * d, dtype=torch.bool, device=lens.device).index_fill_(
            0, index, value=False
        )
    first = ((lens + counts + page - 1) // page * page).unsqueeze(1)
    return (lens.unsqueeze(1) + torch.arange(d, device=lens.device) >= first).flatten()


def _extend(
    worker: Worker,
    drafts: DraftRelay,
    batch: ScheduleBatch,
    verdict: DraftVerdict,
    accepted: Accepted,
    kept: _KeptTokens,
    slots: torch.Tensor,
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
    extend_lens, prefix_lens = drafts.extend_lens(extend, [kept.before[i] for i in kept.going_on])
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


def _verify_overlapped(
    engine: Engine, worker: Worker, drafts: DraftRelay, batch: ScheduleBatch, result: StepResult
) -> None:
    """One step of a batch whose slots are allocated ahead; ``batch.seq_lens`` does not count the bonus tokens. The
    first ``accept_lens[i]`` of the ``next_token_ids`` of request i are its tokens."""
    start, rows, lens = batch.draft_input, batch.req_pool_indices, batch.seq_lens
    observer, bound, b, d = engine.observer, batch.longest, batch.batch_size, worker.spec.draft_tokens
    at = DraftRows(rows, lens, bound)
    with observer.range("draft", draft_step(batch.step), b):
        tree = worker.drafter.draft(start, at)
    with observer.range("verify", batch.step, b * d):
        output = worker.verifier.forward(tree, at, None)
    with observer.range("sample", batch.step, b):
        info = sampling_of(batch)
        verdict = worker.verifier.predict(tree, output, info, lens)
        accepted = worker.acceptance.judge(tree, verdict.predict, rows, info)
        _count_accepted(info, verdict.predict, accepted.places)
        new_lens = lens + accepted.lens
    with observer.range("publish", batch.step, b):
        drafts.publish(batch, new_lens)
    with observer.range("draft_extend", extend_step(batch.step), b * d):
        step_lens = drafts.step_lens(batch, d)
        ends = drafts.draft_lengths(batch, d)
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
