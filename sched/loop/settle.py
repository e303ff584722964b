"""Settling: a step's result is read and applied to its requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

import torch

from ..batch import DraftInput, ScheduleBatch, StepResult, VerifiedTokens
from ..disagg.layout import Metadata
from ..memory.allocation import release_kv_cache
from ..model.grammar import GrammarError
from ..request import Request, Status
from .engine import Engine


def settle(engine: Engine, batch: ScheduleBatch, result: StepResult) -> bool:
    """Read the step's tokens, waiting for them if necessary. Returns whether it was a decode in which every request got
    its token and continues."""
    if batch.forward_mode.is_idle and result.next_token_ids_cpu is None:
        return False  # no result to read or wait for
    token_ids = _host_tokens(result)
    _keep_logprobs(batch, result)
    _keep_prompt_logprobs(batch, result)
    _keep_hidden_states(batch, result)
    if batch.forward_mode.is_extend:
        _settle_extend(engine, batch, token_ids, result.next_draft_input)
        return False
    engine.allocator.free_group_begin()
    all_continue = _append_tokens(engine, batch.reqs, token_ids)
    engine.allocator.free_group_end()
    return all_continue and not batch.is_empty


def _host_tokens(result: StepResult) -> list[int]:
    token_ids = result.next_token_ids_cpu
    if token_ids is None:  # the serial loop reads the device tensor itself
        token_ids = result.next_token_ids
    elif result.copy_done is not None:
        result.copy_done.synchronize()
    assert token_ids is not None
    on_host: list[int] = token_ids.tolist()
    return on_host


def _keep_logprobs(batch: ScheduleBatch, result: StepResult) -> None:
    """Append the logprobs of the tokens that are about to be appended, for requests that asked for them."""
    if result.next_token_logprobs is None:
        return
    for req, logprob in zip(batch.reqs, result.next_token_logprobs.tolist(), strict=True):
        unfinished = req.inflight_middle_chunks > 0 and req not in batch.decoding_reqs
        if req.sampling.logprobs and req.status is Status.RUNNING and not unfinished:
            req.output_logprobs.append(logprob)


def _keep_prompt_logprobs(batch: ScheduleBatch, result: StepResult) -> None:
    """Append the logprobs of prompts; those that a retracted request had before are computed again in part."""
    if result.prompt_logprobs is None:
        return
    values, begin = result.prompt_logprobs.tolist(), 0
    for req, (start, count) in zip(batch.reqs, result.spans, strict=True):
        if req.sampling.prompt_logprobs and req.status is Status.RUNNING:
            first, last = len(req.prompt_logprobs), len(req.origin_input_ids) - 1
            req.prompt_logprobs += values[begin + first - start : begin + min(count, last - start)]
        begin += count


def _keep_hidden_states(batch: ScheduleBatch, result: StepResult) -> None:
    if result.hidden_states is None:
        return
    rows = iter(result.hidden_states.tolist())
    for req, (start, count) in zip(batch.reqs, result.spans, strict=True):
        own = dict(enumerate(islice(rows, count), start))
        if req.sampling.hidden_states and req.status is Status.RUNNING:
            req.hidden_states.update(own)


def _settle_extend(
    engine: Engine, batch: ScheduleBatch, token_ids: list[int], draft: DraftInput | None
) -> None:
    prompts = batch.batch_size - len(batch.decoding_reqs)  # a mixed batch's decodes come after its prompts
    for row, (req, token) in enumerate(zip(batch.reqs[:prompts], token_ids[:prompts], strict=True)):
        if req.status is not Status.RUNNING:  # it ended, or its KV was taken back, after the launch
            continue
        if req.inflight_middle_chunks > 0:
            req.inflight_middle_chunks -= 1  # more chunks of the prompt follow: this token has no meaning
            if engine.outbox is not None:
                engine.outbox.chunk_computed(req)
        elif engine.outbox is not None:
            # A blocking copy for each part, as upstream's.
            parts = () if draft is None else tuple(part[row].cpu() for part in draft.state)
            _send_prompt(engine, req, token, parts)
        else:
            req.output_ids.append(token)
            if not announce_token(engine, req):
                engine.cache.cache_unfinished_req(req)
                engine.tier.admit(req)
    _append_tokens(engine, batch.reqs[prompts:], token_ids[prompts:])


def _append_tokens(engine: Engine, reqs: list[Request], token_ids: list[int]) -> bool:
    """Append and announce a decoded token of each request that still runs. Returns whether all requests continue.

    An end takes time on the host, so that the tokens up to each end are announced together before it.
    """
    new: list[Request] = []
    running, eos = Status.RUNNING, engine.config.eos_token_ids
    for req, token in zip(reqs, token_ids, strict=True):
        if req.status is not running:  # it ended, or its KV was taken back, after the launch
            continue
        output = req.output_ids
        output.append(token)
        new.append(req)
        if len(output) < req.may_end_at and token not in req.stops:  # as ``_ending`` has noted
            continue
        ending = _ending(req, token, eos)
        if ending is not None:
            _announce_tokens(engine, new)
            new = []
            if req.status is running:
                finish(engine, req, *ending)
    aborted = _announce_tokens(engine, new)
    return len(new) == len(reqs) and not aborted


def _announce_tokens(engine: Engine, reqs: list[Request]) -> bool:
    """Announce the last output token of each request, and end the requests that an observer aborts then. Returns
    whether there were any."""
    engine.observer.tokens(reqs, 1)
    aborted = [req for req in reqs if req.to_finish]
    for req in aborted:
        finish(engine, req, Status.ABORTED, req.to_finish)
    return bool(aborted)


def _send_prompt(engine: Engine, req: Request, token: int, draft: tuple[torch.Tensor, ...]) -> None:
    """Send a prompt that is computed completely to its decode worker, where its first token is announced."""
    assert engine.outbox is not None
    req.output_ids.append(token)
    req.first_token_at = engine.clock.now()
    engine.observer.tokens([req], 1)
    engine.cache.cache_unfinished_req(req)
    logprobs = tuple(req.output_logprobs)
    metadata = Metadata(token, logprobs, req.cached_tokens, req.first_scheduled_at, req.first_token_at, draft)
    engine.outbox.finish(req, metadata)


def announce_token(engine: Engine, req: Request) -> bool:
    """Announce the last output token of ``req``. Returns whether the request ended with it."""
    if req.first_token_at is None:
        req.first_token_at = engine.clock.now()
    engine.observer.tokens([req], 1)
    ending = _ending(req, req.output_ids[-1], engine.config.eos_token_ids)
    if ending is not None:
        finish(engine, req, *ending)
    return ending is not None


def _ending(req: Request, token: int, eos: Collection[int]) -> tuple[Status, str] | None:
    """How the request ends with ``token``, its last one, if it does. ``eos`` are the model's tokens that end a text.

    If it does not, ``req.may_end_at`` and ``req.stops`` say from now on which tokens need no such question.
    """
    sampling, grammar = req.sampling, req.grammar
    if not req.may_end_at:
        req.stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos))
    if grammar is not None:
        try:
            grammar.accept_token(token)
        except GrammarError as error:  # penalties have excluded every token that the grammar allows
            return Status.FAILED, str(error)
    if req.to_finish:
        return Status.ABORTED, req.to_finish
    if len(req.output_ids) >= sampling.max_new_tokens:
        return Status.FINISHED, "length"
    if token in req.stops:
        return Status.FINISHED, "stop"
    if grammar is None:
        req.may_end_at = sampling.max_new_tokens
    elif grammar.is_terminated():
        return Status.FINISHED, "grammar"
    return None


def finish(engine: Engine, req: Request, status: Status, reason: str) -> None:
    """End a running request. Its KV is given to the cache and its row to the pool."""
    engine.observer.ending(req)
    speculative = engine.config.speculative is not None
    if speculative:  # a step in flight has claimed the next token's slot
        req.kv_committed_len = req.seqlen - 1
    engine.tier.release(req)
    release_kv_cache(req, engine.cache, speculative=speculative)
    close(engine, req, status, reason)


def drop(engine: Engine, req: Request, status: Status, reason: str) -> None:
    """End a request in any state, without keeping its KV."""
    if req.req_pool_idx is not None:
        engine.tier.release(req)
        speculative = engine.config.speculative is not None
        release_kv_cache(req, engine.cache, is_insert=False, speculative=speculative)
    close(engine, req, status, reason)


def close(engine: Engine, req: Request, status: Status, reason: str) -> None:
    """End a request that holds no KV and no row."""
    assert not req.status.terminal, f"request {req.id} ended twice"
    req.prefix_indices = req.last_node = None  # the match of a waiting request
    req.draft = ()
    req.cache_protected_len = 0
    req.status = status
    req.reason = reason
    req.finished_at = engine.clock.now()
    engine.observer.ended(req)
    engine.source.ended(req, req.finished_at)


# ---- a verify: several tokens per request, of which an ending may discard some -------------------------------


def settle_verify(engine: Engine, batch: ScheduleBatch, result: StepResult) -> bool:
    """Give every request its tokens, waiting for them if necessary; a serial verify has done so already. Returns
    whether every request got tokens and continues."""
    engine.allocator.free_group_begin()
    verified = _take_late(engine, batch, result) if result.verified is None else result.verified
    all_continue = True
    for req, entry in zip(batch.reqs, verified, strict=True):
        if entry is None:
            all_continue = False
            continue
        req.verify_ct += 1
        engine.observer.verified(req, entry.accepted)
        engine.observer.tokens([req], entry.kept)
        ending = entry.ending
        if req.to_finish and (ending or result.verified is None):  # a serial verify has begun its next draft
            ending = Status.ABORTED, req.to_finish
        if ending is not None:
            finish(engine, req, *ending)
            all_continue = False
    engine.allocator.free_group_end()
    return all_continue


def take_tokens(
    engine: Engine, req: Request, tokens: Sequence[int], logprobs: Sequence[float]
) -> tuple[int, tuple[Status, str] | None]:
    """Append tokens, without announcing them, until one of them ends the request. Returns how many were
    appended, and how the request ends."""
    for count, token in enumerate(tokens, 1):
        if logprobs and req.sampling.logprobs:
            req.output_logprobs.append(logprobs[count - 1])
        req.output_ids.append(token)
        ending = _ending(req, token, engine.config.eos_token_ids)
        if ending is not None:
            return count, ending
    return len(tokens), None


def _take_late(engine: Engine, batch: ScheduleBatch, result: StepResult) -> Sequence[VerifiedTokens | None]:
    token_ids = result.next_token_ids_cpu
    if token_ids is None:  # the serial loop reads the device tensors themselves
        token_ids = result.next_token_ids
    elif result.copy_done is not None:
        result.copy_done.synchronize()
    assert token_ids is not None and result.accept_lens is not None
    predict: list[int] = token_ids.tolist()
    accept_lens: list[int] = result.accept_lens.tolist()
    scores = result.next_token_logprobs
    logprobs: list[float] = [] if scores is None else scores.tolist()
    verified: list[VerifiedTokens | None] = []
    for i, (req, accepted) in enumerate(zip(batch.reqs, accept_lens, strict=True)):
        if req.status is not Status.RUNNING:  # it ended, or its KV was taken back, after the launch
            verified.append(None)
            continue
        own = slice(i * result.draft_tokens, i * result.draft_tokens + accepted)
        req.kv_committed_len += accepted - 1  # the bonus token's slot was claimed before the launch
        verified.append(VerifiedTokens(accepted, *take_tokens(engine, req, predict[own], logprobs[own])))
    return verified
