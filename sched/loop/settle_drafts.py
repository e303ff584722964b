"""Settling a verify: its result has several tokens per request, of which an ending may discard some."""

from __future__ import annotations

from collections.abc import Sequence

from ..batch import ScheduleBatch, StepResult, VerifiedTokens
from ..request import Request, Status
from .engine import Engine
from .settle import append_token, finish


def settle_verify(engine: Engine, batch: ScheduleBatch, result: StepResult) -> bool:
    """Give every request its tokens, waiting for them if necessary; a serial verify has done so already. Returns
    whether every request got tokens and continues."""
    engine.allocator.free_group_begin()
    verified = _take_late(engine, batch, result) if result.verified is None else result.verified
    all_continue = True
    for req, entry in zip(batch.reqs, verified, strict=True):
        if entry is None or _announce(engine, req, entry):
            all_continue = False
    engine.allocator.free_group_end()
    return all_continue


def take_tokens(
    engine: Engine, req: Request, tokens: Sequence[int], logprobs: Sequence[float]
) -> tuple[int, tuple[Status, str] | None]:
    """Append tokens until one of them ends the request. Returns how many were appended, and how the request ends."""
    for count, token in enumerate(tokens, 1):
        if logprobs and req.sampling.logprobs:
            req.output_logprobs.append(logprobs[count - 1])
        ending = append_token(engine, req, token)
        if ending is not None:
            return count, ending
    return len(tokens), None


def _take_late(engine: Engine, batch: ScheduleBatch, result: StepResult) -> Sequence[VerifiedTokens | None]:
    predict, accept_lens, logprobs = _host_tokens(result)
    verified: list[VerifiedTokens | None] = []
    for i, (req, accepted) in enumerate(zip(batch.reqs, accept_lens, strict=True)):
        if req.status is not Status.RUNNING:  # it ended, or its KV was taken back, after the launch
            verified.append(None)
            continue
        own = slice(i * result.draft_tokens, i * result.draft_tokens + accepted)
        req.kv_committed_len += accepted - 1  # the bonus token's slot was claimed before the launch
        verified.append(VerifiedTokens(accepted, *take_tokens(engine, req, predict[own], logprobs[own])))
    return verified


def _host_tokens(result: StepResult) -> tuple[list[int], list[int], list[float]]:
    if result.next_token_ids_cpu is None:  # the serial loop reads the device tensors themselves
        assert result.next_token_ids is not None and result.accept_lens is not None
        logprobs = result.next_token_logprobs
        predict: list[int] = result.next_token_ids.tolist()
        accepted: list[int] = result.accept_lens.tolist()
        return predict, accepted, [] if logprobs is None else logprobs.tolist()
    if result.copy_done is not None:
        result.copy_done.synchronize()
    assert result.accept_lens_cpu is not None
    logprobs = result.next_token_logprobs_cpu
    scores: list[float] = [] if logprobs is None else logprobs.tolist()
    return result.next_token_ids_cpu.tolist(), result.accept_lens_cpu.tolist(), scores


def _announce(engine: Engine, req: Request, verified: VerifiedTokens) -> bool:
    """Tell of the tokens; returns whether the request ended with them."""
    req.verify_ct += 1
    engine.observer.verified(req, verified.accepted)
    engine.observer.tokens(req, verified.kept)
    if verified.ending is not None:
        finish(engine, req, *verified.ending)
    return verified.ending is not None
