"""Preparation of batches for their launch (upstream ``ScheduleBatch.prepare_for_*``).

Everything here runs on the schedule stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import torch

from ..batch import ROW_FIELDS, DraftState, ForwardMode, ScheduleBatch
from ..config import BlockConfig
from ..disagg.inbox import ReadyRequest
from ..loop import fused, split
from ..model.sampling_info import SamplingInfo, sampling_of
from ..request import Request, Status
from ..speculate.worker import Worker
from .ahead import prepare_ahead
from .encoder import staged_parts, strip_encoder
from .engine import Engine

_PLACE_PROMPTS = {"split": split.place_prompts, "fused": fused.place_prompts}
_PLACE_TOKENS = {"split": split.place_tokens, "fused": fused.place_tokens}


def prepare_for_extend(engine: Engine, reqs: Sequence[Request], step: int) -> ScheduleBatch:
    """The prefill batch of planned requests, whose fill_len, extend_input_len and prefix_indices are set."""
    batch = ScheduleBatch(reqs=list(reqs), forward_mode=ForwardMode.EXTEND, step=step)
    batch.prefix_lens = [req.prefix_len for req in reqs]
    batch.extend_lens = [req.extend_input_len for req in reqs]
    batch.extend_num_tokens = sum(batch.extend_lens)
    parts = staged_parts(engine, reqs)
    engine.relay.stage_prompt(
        batch, parts if engine.config.blocks is None else padded(parts, engine.config.blocks)
    )
    batch.seq_lens_cpu = torch.tensor([req.fill_len for req in reqs], dtype=torch.int64)
    split.take_rows(engine, batch)
    rows = _PLACE_PROMPTS[engine.relay.row.preparation](engine, batch)
    engine.tier.place_prompts(batch)
    if engine.config.encoder:
        strip_encoder(engine, batch)
    for req in reqs:
        _enter(req, engine.clock.now())
    return _with_sampling_info(engine, batch, rows)


def padded(parts: Sequence[array[int]], blocks: BlockConfig) -> list[array[int]]:
    """The tokens of each block, with masks for those that are not known."""
    return [part + array("q", [blocks.mask_id]) * (blocks.size - len(part)) for part in parts]


def rejoin(engine: Engine, reqs: Sequence[Request]) -> ScheduleBatch:
    """The batch of staged requests that can join the running one (upstream ``_build_hisparse_decode_batch``)."""
    batch = ScheduleBatch(reqs=list(reqs), forward_mode=ForwardMode.DECODE)
    engine.relay.bootstrap(batch)
    return _with_sampling_info(engine, batch)


def prebuild(engine: Engine, ready: Sequence[ReadyRequest], step: int) -> ScheduleBatch:
    """The same for requests whose prompt another worker has computed (upstream ``prepare_for_prebuilt``)."""
    batch = ScheduleBatch(reqs=[entry.req for entry in ready], forward_mode=ForwardMode.DECODE, step=step)
    engine.relay.prebuild(batch)
    for req in batch.reqs:
        engine.tier.admit_direct(req)
    if engine.worker is not None:
        assert engine.relay.drafts is not None
        parts = zip(*(entry.draft for entry in ready), strict=True)
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
    if spec is not None:
        _PREPARE_DRAFTS[spec.mode](engine, batch)
        return
    _PLACE_TOKENS[relay.row.preparation](engine, batch)
    engine.tier.place_tokens(batch, relay)
    for req in batch.reqs:
        req.kv_committed_len += 1
        req.kv_allocated_len += 1


def _prepare_v1(engine: Engine, batch: ScheduleBatch) -> None:
    """The serial worker allocates its slots itself."""
    assert engine.config.speculative is not None
    batch.longest = max(req.kv_committed_len for req in batch.reqs) + engine.config.speculative.alloc_len


_PREPARE_DRAFTS = {"v1": _prepare_v1, "v2": prepare_ahead}


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
    engine: Engine,
    batch: ScheduleBatch,
    *,
    without: Collection[Request] = (),
    keep: Sequence[int] | None = None,
) -> None:
    """Keep the running requests except ``without``, or the rows ``keep`` in that order. An empty batch keeps stale
    tensors and must not be merged."""
    if keep is None:
        running = Status.RUNNING
        keep = [i for i, req in enumerate(batch.reqs) if req.status is running and req not in without]
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
    _index_rows(batch, rows, list(keep))
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
    _append_rows(batch, other)
    if not keep_input:
        engine.relay.merge(batch, other)
    batch.reqs = batch.reqs + other.reqs
    batch.rows_changed = True


def _enter(req: Request, now: int) -> None:
    req.status = Status.RUNNING
    req.kv_committed_len = req.kv_allocated_len = req.fill_len
    if req.first_scheduled_at is None:
        req.first_scheduled_at = now
        req.cached_tokens = req.prefix_len


def _index_rows(batch: ScheduleBatch, rows: torch.Tensor, keep: list[int]) -> None:
    batch.req_pool_indices = batch.req_pool_indices[rows]
    batch.req_pool_indices_cpu = batch.req_pool_indices_cpu[keep]
    batch.seq_lens = batch.seq_lens[rows]
    if batch.has_host_lengths:  # speculation may do without
        batch.seq_lens_cpu = batch.seq_lens_cpu[keep]
    batch.orig_seq_lens = batch.orig_seq_lens[rows]
    batch.unset("out_cache_loc")


def _append_rows(batch: ScheduleBatch, other: ScheduleBatch) -> None:
    for name in ROW_FIELDS:
        if hasattr(batch, name) and hasattr(other, name):
            setattr(batch, name, torch.cat([getattr(batch, name), getattr(other, name)]))
        else:
            batch.unset(name)
    batch.unset("out_cache_loc")


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
