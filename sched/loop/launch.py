"""One step on the device: resolve the input, run the model, sample, publish the result."""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch

from ..batch import EncoderTokens, ForwardBatch, ModelOutput, ScheduleBatch, StepResult
from ..kernels.arrays import largest
from ..kernels.rows import decode_positions, extend_positions
from ..model.sampling import SamplingInfo, sampling_of
from ..request import Request
from .engine import Engine


class Sampled(NamedTuple):
    token_ids: torch.Tensor  # [b] int64
    logprobs: torch.Tensor | None  # [b] float32, where a request asked for them


class _Sampling(NamedTuple):
    """Everything that sampling a step needs: if it is delayed, the batch may have changed by then."""

    step: int
    reqs: list[Request]
    seq_lens: torch.Tensor  # [b] int64
    output: ModelOutput
    info: SamplingInfo  # the forward's own copy


def launch_step(engine: Engine, batch: ScheduleBatch, *, overlapped: bool = True) -> StepResult:
    """Enqueue the step on the forward stream and return without waiting for it; or run it on the current stream, and
    leave the result's tokens on the device."""
    relay = engine.relay
    result = StepResult(next_token_ids=None, future_indices=relay.open(batch))
    relay.host_lengths(batch)
    with relay.isolate(batch):
        sampling = _sampling(batch, run_model(engine, batch))
        _return_more(batch, sampling.output, result)
        is_delayed = overlapped and sampling.info.needs.grammar
        sampled = None if is_delayed else _sample(engine, sampling)
        with engine.observer.range("publish", batch.step, len(batch.reqs)):
            relay.publish(batch)
            if sampled is not None:
                _hand_on(engine, sampled, result, copies=overlapped)
        if is_delayed:
            result.delay_sample_func = partial(_sample_and_copy, engine, sampling, result)
        relay.keep_alive(batch, result)
    if overlapped:
        relay.reads_done(batch)
    relay.conclude(batch, result)
    return result


def launch_delayed_sample(engine: Engine, result: StepResult) -> None:
    """Sample a step whose vocabulary mask depends on the previous step's tokens."""
    if result.delay_sample_func is None:
        return
    streams = engine.streams
    with streams.on(streams.forward):
        streams.wait(streams.forward, streams.schedule)
        result.delay_sample_func()
    result.delay_sample_func = None  # it holds the logits


def launch_stage(
    engine: Engine, batch: ScheduleBatch, proxies: tuple[torch.Tensor, ...]
) -> tuple[StepResult, tuple[torch.Tensor, ...]]:
    """Enqueue a pipeline stage's part of the step on the current stream, after ``proxies`` of the preceding stage.

    Returns the result, whose tokens only the last stage has, and the proxies for the next one.
    """
    relay = engine.relay
    result = StepResult(next_token_ids=None, future_indices=relay.open(batch))
    relay.host_lengths(batch)
    with relay.isolate(batch):
        sampling = _sampling(batch, run_model(engine, batch, proxies))
        if engine.stage is not None and engine.stage.is_last:
            result.next_token_ids, result.next_token_logprobs = _sample(engine, sampling)
    result.copy_done = engine.streams.module.Event()
    result.copy_done.record()
    return result, sampling.output.proxies


def make_forward_batch(engine: Engine, batch: ScheduleBatch) -> ForwardBatch:
    """The model's view of a batch (upstream ``ForwardBatch.init_new``): aliases its tensors, adds positions."""
    if batch.input_ids is None:
        raise ValueError(f"step {batch.step} has no input ids: its relay was not resolved")
    extend_lens = extend_prefix_lens = None
    if batch.forward_mode.is_extend:
        extend_lens, extend_prefix_lens = _extend_rows(engine, batch)
        positions = extend_positions(batch.seq_lens, extend_lens, batch.extend_num_tokens)
    elif batch.positions is not None:
        positions = batch.positions
    else:
        positions = decode_positions(batch.seq_lens)
    longest = largest(batch.seq_lens_cpu) if batch.reqs else 0
    # In every step: arguments with names take three times as long.
    forward = ForwardBatch(
        batch.forward_mode,
        batch.input_ids,
        positions,
        batch.req_pool_indices,
        batch.seq_lens,
        batch.out_cache_loc,
        longest,
    )
    if extend_lens is not None:
        forward.extend_lens, forward.extend_prefix_lens = extend_lens, extend_prefix_lens
        forward.max_extend_len = max(batch.extend_lens)
        forward.prompt_targets = _prompt_targets(engine, batch)
        forward.encoder = _encoder_input(engine, batch)
    forward.sampling_info = batch.sampling_info
    forward.global_num_tokens, forward.graph_rows = batch.global_num_tokens, batch.graph_rows
    forward.capture_hidden = sampling_of(batch).needs.hidden_states
    return forward


def _encoder_input(engine: Engine, batch: ScheduleBatch) -> EncoderTokens | None:
    """The encoder's tokens of a prefill, with their ids on the device, by a copy of the current stream."""
    if batch.encoder is None:
        return None
    return batch.encoder._replace(
        input_ids=batch.encoder.input_ids.to(engine.config.device, non_blocking=True)
    )


def _extend_rows(engine: Engine, batch: ScheduleBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of new tokens of each request, and of tokens before them: [b] int32 each."""
    if batch.extend_rows is not None:
        extend_lens, prefix_lens = batch.extend_rows.unbind()
        return extend_lens, prefix_lens
    device = engine.config.device
    if engine.relay.row.preparation == "fused":
        rows = torch.tensor(
            [batch.extend_lens, batch.prefix_lens], dtype=torch.int32, pin_memory=engine.pinned
        )
        extend_lens, prefix_lens = rows.to(device, non_blocking=True).unbind()
        return extend_lens, prefix_lens
    extend_lens = torch.tensor(batch.extend_lens, dtype=torch.int32).to(device, non_blocking=True)
    prefix_lens = torch.tensor(batch.prefix_lens, dtype=torch.int32).to(device, non_blocking=True)
    return extend_lens, prefix_lens


def _prompt_targets(engine: Engine, batch: ScheduleBatch) -> torch.Tensor | None:
    """The next tokens [T] of prompts, where their log probabilities were asked for; 0 behind a prompt."""
    if not sampling_of(batch).needs.prompt_logprobs:
        return None
    targets: list[int] = []
    for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        known = req.origin_input_ids[start + 1 : start + 1 + count]
        targets += [*known, *repeat(0, count - len(known))]
    return torch.tensor(targets, dtype=torch.int64).to(engine.config.device, non_blocking=True)


def _return_more(batch: ScheduleBatch, output: ModelOutput, result: StepResult) -> None:
    """Add to the result what requests asked for beside tokens, with the positions that it belongs to."""
    result.prompt_logprobs, result.hidden_states = output.prompt_logprobs, output.hidden_states
    if result.prompt_logprobs is None and result.hidden_states is None:
        return
    if batch.forward_mode.is_extend:
        result.spans = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))
    else:
        result.spans = [(length - 1, 1) for length in batch.seq_lens_cpu.tolist()]


def sample_forward(engine: Engine, batch: ScheduleBatch, output: ModelOutput) -> Sampled:
    return _sample(engine, _sampling(batch, output))


def run_model(engine: Engine, batch: ScheduleBatch, proxies: tuple[torch.Tensor, ...] = ()) -> ModelOutput:
    """The model's output for a batch whose input is resolved."""
    engine.tier.before_forward(batch)
    with engine.observer.range("model", batch.step, batch.num_tokens):
        forward_batch = make_forward_batch(engine, batch)
        forward_batch.proxies = proxies
        return engine.runner.forward(forward_batch)


def _sampling(batch: ScheduleBatch, output: ModelOutput) -> _Sampling:
    return _Sampling(batch.step, batch.reqs, batch.seq_lens, output, sampling_of(batch))


def _sample(engine: Engine, sampling: _Sampling) -> Sampled:
    if not sampling.reqs:
        return Sampled(torch.empty(0, dtype=torch.int64, device=engine.config.device), None)
    with engine.observer.range("sample", sampling.step, len(sampling.reqs)):
        sampling.info.update_vocab_mask()
        token_ids = engine.sampler.sample(sampling.output, sampling.info, sampling.seq_lens)
        logprobs = None
        if sampling.info.needs.logprobs:
            logprobs = engine.sampler.score(
                sampling.output, sampling.info, sampling.seq_lens, token_ids
            ).logprobs
        engine.relay.penalty_tokens.after_sampling(sampling.info, token_ids)
    return Sampled(token_ids, logprobs)


def _hand_on(engine: Engine, sampled: Sampled, result: StepResult, *, copies: bool) -> None:
    """Stash the tokens for the next step on the device; with ``copies``, start their copy to the host."""
    engine.relay.stash(result.future_indices, sampled.token_ids)
    result.next_token_ids, result.next_token_logprobs = sampled
    if not copies:
        return
    if sampled.logprobs is not None:
        result.next_token_logprobs = sampled.logprobs.to("cpu", non_blocking=True)
    if result.prompt_logprobs is not None:
        result.prompt_logprobs = result.prompt_logprobs.to("cpu", non_blocking=True)
    if result.hidden_states is not None:
        result.hidden_states = result.hidden_states.to("cpu", non_blocking=True)
    result.next_token_ids_cpu = sampled.token_ids.to("cpu", non_blocking=True)
    if engine.config.capabilities.events:
        result.copy_done = engine.streams.module.Event()
        result.copy_done.record()


def _sample_and_copy(engine: Engine, sampling: _Sampling, result: StepResult) -> None:
    sampled = _sample(engine, sampling)
    with engine.observer.range("publish", sampling.step, len(sampling.reqs)):
        _hand_on(engine, sampled, result, copies=True)
