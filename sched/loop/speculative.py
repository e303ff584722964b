"""One step under speculation: a prompt for both models, or draft, verify and draft extend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..batch import DraftInput, ForwardMode, ScheduleBatch, StepResult, VerifiedTokens, extend_step
from ..kernels.rows import extend_positions
from ..model.sampling import sampling_of
from ..relay.row import DraftRelay
from ..request import Request
from ..speculate.worker import Worker, verify_overlapped, verify_serial
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
        _verify_serially(worker, drafts, batch, result, engine)
    else:
        verify_overlapped(worker, batch, drafts, result)


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


def _verify_serially(
    worker: Worker, drafts: DraftRelay, batch: ScheduleBatch, result: StepResult, engine: Engine
) -> None:
    """Requests have their tokens when this returns; ``settle`` announces them and ends those that are done."""
    verified: list[VerifiedTokens] = []

    def take(req: Request, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[int, bool]:
        count, ending = take_tokens(engine, req, tokens, logprobs)
        verified.append(VerifiedTokens(len(tokens), count, ending))
        return count, ending is None

    verify_serial(worker, batch, take, drafts.extend_lens, result)
    result.verified = verified


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
