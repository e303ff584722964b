"""Preparation of batches for their launch (upstream ``ScheduleBatch.prepare_for_*``).

Everything here runs on the schedule stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import torch

from ..batch import ROW_FIELDS, DraftState, EncoderTokens, ForwardMode, ScheduleBatch
from ..model.sampling import SamplingInfo, sampling_of
from ..request import Request, Status
from ..speculate.worker import Worker
from .engine import Engine
from .placement import fused_prompts, fused_tokens, prepare_ahead, split_prompts, split_tokens, take_rows


def prepare_for_extend(engine: Engine, reqs: Sequence[Request], step: int) -> ScheduleBatch:
    """The prefill batch of planned requests, whose fill_len, extend_input_len and prefix_indices are set."""
    batch = ScheduleBatch(reqs=list(reqs), forward_mode=ForwardMode.EXTEND, step=step)
    batch.prefix_lens = [req.prefix_len for req in reqs]
    batch.extend_lens = [req.extend_input_len for req in reqs]
    batch.extend_num_tokens = sum(batch.extend_lens)
    # A fused preparation strips the encoder's tokens first; upstream stages them and, once stripped, the rest again.
    fused, blocks = engine.relay.row.preparation == "fused", engine.config.blocks
    strip = engine.config.encoder and fused
    parts = [req.tokens(max(req.prefix_len, strip * req.encoder_len), req.fill_len) for req in reqs]
    if blocks is not None:  # masks stand for the tokens that are not known
        parts = [part + array("q", [blocks.mask_id]) * (blocks.size - len(part)) for part in parts]
    engine.relay.stage_prompt(batch, parts)
    batch.seq_lens_cpu = torch.tensor([req.fill_len for req in reqs], dtype=torch.int64)
    take_rows(engine, batch)
    rows = (fused_prompts if fused else split_prompts)(engine, batch)
    engine.tier.place_prompts(batch)
    if engine.config.encoder:
        _strip_encoder(engine, batch)
    for req in reqs:
        req.status = Status.RUNNING
        req.kv_committed_len = req.kv_allocated_len = req.fill_len
        if req.first_scheduled_at is None:
            req.first_scheduled_at = engine.clock.now()
            req.cached_tokens = req.prefix_len
    return _with_sampling_info(engine, batch, rows)


def _strip_encoder(engine: Engine, batch: ScheduleBatch) -> None:
    """Leave the decoder's tokens in the batch; those of the encoder become ``batch.encoder`` (upstream
    ``prepare_encoder_info_extend``).

    A prompt begins with its encoder's tokens, and rows and slots are allocated for all of it. Unlike upstream's,
    ``seq_lens`` go on counting both parts, so that allocation and pages are those of any batch; the lengths that
    upstream uploads in their place are the model's.
    """
    reqs = batch.reqs
    assert not any(batch.prefix_lens), "the encoder's tokens are computed as a whole"
    whole, lens = batch.extend_lens, [req.encoder_len for req in reqs]
    batch.prefix_lens, batch.extend_lens = lens, [a - b for a, b in zip(whole, lens, strict=True)]
    batch.extend_num_tokens, batch.extend_rows = sum(batch.extend_lens), None
    pieces = batch.out_cache_loc.split(
        [n for pair in zip(lens, batch.extend_lens, strict=True) for n in pair]
    )
    batch.out_cache_loc = torch.cat(pieces[1::2])
    encoder_lens, decoder_lens = _uploaded(engine, lens, batch.extend_lens)
    ids = torch.tensor([id for req in reqs for id in req.tokens(0, req.encoder_len)], dtype=torch.int64)
    staged = ids.pin_memory() if engine.pinned else ids
    batch.encoder = EncoderTokens(staged, torch.cat(pieces[::2]), encoder_lens, decoder_lens)
    if engine.relay.row.preparation == "split":
        engine.relay.rebuild_prompt(batch, [req.tokens(req.encoder_len, req.fill_len) for req in reqs])


def _uploaded(engine: Engine, *arrays: list[int]) -> Sequence[torch.Tensor]:
    """[b] int64 each: in one copy by a fused preparation, else one after the other."""
    device, pinned = engine.config.device, engine.pinned
    if engine.relay.row.preparation == "fused":
        packed = torch.tensor(arrays, dtype=torch.int64, pin_memory=pinned)
        return packed.to(device, non_blocking=True).unbind()
    return [
        torch.tensor(each, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)
        for each in arrays
    ]


def rejoin(engine: Engine, reqs: Sequence[Request]) -> ScheduleBatch:
    """The batch of staged requests that can join the running one (upstream ``_build_hisparse_decode_batch``)."""
    batch = ScheduleBatch(reqs=list(reqs), forward_mode=ForwardMode.DECODE)
    engine.relay.bootstrap(batch)
    return _with_sampling_info(engine, batch)


def prebuild(engine: Engine, reqs: Sequence[Request], step: int) -> ScheduleBatch:
    """The same for requests whose prompt another worker has computed (upstream ``prepare_for_prebuilt``)."""
    batch = ScheduleBatch(reqs=list(reqs), forward_mode=ForwardMode.DECODE, step=step)
    engine.relay.prebuild(batch)
    for req in batch.reqs:
        engine.tier.admit_direct(req)
    if engine.worker is not None:
        assert engine.relay.drafts is not None
        parts = zip(*(req.draft for req in reqs), strict=True)
        engine.relay.drafts.seed(batch, DraftState(*(torch.stack(part) for part in parts)))
        _begin_acceptance(engine, engine.worker, batch.req_pool_indices, batch.reqs)
    for req in batch.reqs:
        req.status = Status.RUNNING
    return _with_sampling_info(engine, batch)


def _begin_acceptance(engine: Engine, worker: Worker, rows: torch.Tensor, reqs: Sequence[Request]) -> None:
    """Initialise the requests' simulated acceptance on the stream that runs verifies."""
    streams = engine.streams
    stream = streams.forward if engine.config.overlap else streams.schedule
    streams.wait(stream, streams.schedule)
    streams.record(rows, stream)
    with streams.on(stream):
        worker.acceptance.begin(rows, reqs)


def _with_sampling_info(
    engine: Engine, batch: ScheduleBatch, rows: torch.Tensor | None = None
) -> ScheduleBatch:
    """``batch`` with the sampling state of its requests; ``rows`` as in ``SamplingInfo.from_requests``."""
    batch.sampling_info = SamplingInfo.from_requests(
        batch.reqs,
        config=engine.config,
        how=engine.relay.row.sampling_tensors,
        exact=engine.relay.penalty_tokens.exact,
        rows=rows,
    )
    batch.rows_changed = True
    return batch


def prepare_for_decode(engine: Engine, batch: ScheduleBatch, step: int) -> None:
    """Prepare the running batch for one more token of every request."""
    batch.forward_mode = ForwardMode.DECODE
    batch.step = step
    batch.encoder = None
    relay = engine.relay
    relay.penalty_tokens.before_decode(batch, sampling_of(batch))
    relay.prepare_input(batch)
    spec = engine.config.speculative
    if spec is None:
        (fused_tokens if relay.row.preparation == "fused" else split_tokens)(engine, batch)
        engine.tier.place_tokens(batch, relay)
        for req in batch.reqs:
            req.kv_committed_len += 1
            req.kv_allocated_len += 1
    elif spec.mode == "v1":  # the serial worker allocates its slots itself
        batch.longest = max(req.kv_committed_len for req in batch.reqs) + spec.alloc_len
    else:
        prepare_ahead(engine, batch)


def mix_with_running(engine: Engine, prefill: ScheduleBatch, running: ScheduleBatch) -> None:
    """Append the decodes of ``running``, which are prepared, to the prompts of ``prefill``."""
    prefill.forward_mode = ForwardMode.MIXED
    for req in running.reqs:
        req.fill_len = req.seqlen
        req.extend_input_len = 1
    prefill.decoding_reqs = running.reqs
    prefill.prefix_lens += (running.seq_lens_cpu - 1).tolist()
    prefill.extend_lens += [1] * running.batch_size
    prefill.extend_num_tokens += running.batch_size
    out_cache_loc = torch.cat([prefill.out_cache_loc, running.out_cache_loc])
    engine.relay.mix(prefill, running)
    merge_rows(engine, prefill, running, keep_input=True)
    prefill.out_cache_loc = out_cache_loc
    prefill.extend_rows = None


def filter_rows(
    engine: Engine, batch: ScheduleBatch, *, without: Collection[Request] = (), keep: list[int] | None = None
) -> None:
    """Keep the running requests except ``without``, or the rows ``keep`` in that order. An empty batch keeps stale
    tensors and must not be merged."""
    if keep is None:
        running = Status.RUNNING
        gone = {*without, *[req for req in batch.reqs if req.status is not running]}
        if not gone:
            return
        keep = [i for i, req in enumerate(batch.reqs) if req not in gone]
    if len(keep) == len(batch.reqs):
        return
    batch.rows_changed = True
    if not keep:
        batch.reqs = []
        return
    rows = torch.tensor(keep, dtype=torch.int64, pin_memory=engine.pinned).to(
        engine.config.device, non_blocking=True
    )
    before = batch.batch_size
    batch.reqs = [batch.reqs[i] for i in keep]
    engine.relay.penalty_tokens.before_rows_change(sampling_of(batch))
    drafts = engine.relay.drafts
    if drafts is not None:
        drafts.rows_wait(batch)
        drafts.filter(batch, rows, before)
    batch.req_pool_indices = batch.req_pool_indices[rows]
    batch.req_pool_indices_cpu = batch.req_pool_indices_cpu[keep]
    batch.seq_lens = batch.seq_lens[rows]
    if batch.has_host_lengths:  # speculation may do without
        batch.seq_lens_cpu = batch.seq_lens_cpu[keep]
    batch.orig_seq_lens = batch.orig_seq_lens[rows]
    batch.unset("out_cache_loc")
    engine.relay.filter(batch, rows)
    sampling_of(batch).filter(keep, rows)


def merge_rows(
    engine: Engine, batch: ScheduleBatch, other: ScheduleBatch, *, keep_input: bool = False
) -> None:
    """Append the other's requests and rows. Sampling state is merged first, because that may read the batches'
    requests."""
    for info in (sampling_of(batch), sampling_of(other)):
        engine.relay.penalty_tokens.before_rows_change(info)
    sampling_of(batch).merge(sampling_of(other))
    drafts = engine.relay.drafts
    if drafts is not None:
        drafts.rows_wait(batch)
        drafts.rows_wait(other)
        drafts.merge(batch, other)
    for name in ROW_FIELDS:
        if hasattr(batch, name) and hasattr(other, name):
            setattr(batch, name, torch.cat([getattr(batch, name), getattr(other, name)]))
        else:
            batch.unset(name)
    batch.unset("out_cache_loc")
    if not keep_input:
        engine.relay.merge(batch, other)
    batch.reqs = batch.reqs + other.reqs
    batch.rows_changed = True


def idle_batch(engine: Engine, step: int) -> ScheduleBatch:
    """A batch of empty tensors: nothing is uploaded and nothing is launched."""
    device = engine.config.device

    def empty(dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=device)

    batch = ScheduleBatch(reqs=[], forward_mode=ForwardMode.IDLE, step=step)
    batch.input_ids, batch.positions = empty(), empty()
    batch.req_pool_indices, batch.req_pool_indices_cpu = empty(), torch.empty(0, dtype=torch.int64)
    batch.seq_lens, batch.seq_lens_cpu = empty(), torch.empty(0, dtype=torch.int64)
    batch.orig_seq_lens = empty(torch.int32)
    batch.out_cache_loc = empty()
    batch.sampling_info = SamplingInfo.empty(engine.config)
    return batch
