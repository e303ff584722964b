"""From a scenario, a device and listeners to a scheduler that is ready to run. The only place where parts meet."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from ...scenarios.combinations import overlaps
from ...sched.config import EngineConfig, HiSparseConfig
from ...sched.data_parallel.mlp import SharedMLP, sharded
from ...sched.disagg.kv import KVPort
from ...sched.disagg.layout import Role
from ...sched.hisparse.pools import HotBuffers
from ...sched.loop.data_parallel import DataRank
from ...sched.loop.decoding import DecodeWorker
from ...sched.loop.engine import Engine, Runner, TokenSampler
from ...sched.loop.prefilling import PrefillWorker
from ...sched.loop.routed import Replica
from ...sched.loop.scheduler import Scheduler
from ...sched.memory.cache import PrefixCache
from ...sched.memory.chunk import ChunkCache
from ...sched.memory.radix import RadixCache
from ...sched.memory.slots import ReqToTokenPool
from ...sched.memory.tokens import KVAllocator, PagedAllocator, TokenAllocator
from ...sched.model.checkpoint import load_weights
from ...sched.model.decoder import Decoder, Model
from ...sched.model.grammar import GrammarCache, GrammarState, Spec
from ...sched.model.runner import ModelRunner
from ...sched.model.sampler import Sampler
from ...sched.model.tags import TaggedDecoder, TagPool
from ...sched.model.weights import Weights, empty_weights, seeded_weights
from ...sched.observe import Clock, Observer
from ...sched.pipeline.decoder import StageDecoder
from ...sched.relay.choice import RelayChoice
from ...sched.relay.draft_row import DraftRow
from ...sched.relay.row import Relay, RelayRow
from ...sched.source import RequestSource
from ...sched.speculate.worker import Worker
from ...sched.streams import Streams
from ..platform.machine import Machine
from ..platform.resolve import Resolved
from ..platform.speculation import draft_worker, kv_pool, speculative_config
from .compose_disagg import hosted, transfer
from .compose_sparse import Host, host_side, index_pool, kv_tier, sparse_attention
from .declared_hazards import name_pools
from .rank_context import ALONE, RankContext


class _Grammars:
    """Compiles grammars for a model that may not be able to have any, once one is asked for."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    @cached_property
    def _cache(self) -> GrammarCache:
        return GrammarCache(self._config.vocab_size, self._config.eos_token_ids)

    def start(self, spec: Spec) -> GrammarState:
        return self._cache.start(spec)


class Guard(Protocol):
    """Looks at a run from inside, and changes nothing that the scheduler could notice."""

    def of_rank(self, rank: int) -> Guard:
        """Who looks at that rank, where there are several."""

    def row(self, row: RelayRow) -> RelayRow: ...

    def draft_row(self, row: DraftRow) -> DraftRow: ...

    def runner(self, runner: Runner) -> Runner: ...

    def worker(self, worker: Worker) -> Worker: ...

    def watching(self, scheduler: Scheduler, machine: Machine) -> AbstractContextManager[Observer]:
        """Around each workload of the run."""


@dataclass(frozen=True, slots=True)
class Composition:
    scheduler: Scheduler
    tags: TagPool | None  # only with values none
    buffers: HotBuffers | None  # only with KV on the host


def engine_config(resolved: Resolved, machine: Machine, context: RankContext = ALONE) -> EngineConfig:
    """The scenario's engine on that machine, with nothing left open."""
    scenario, model = resolved.scenario, resolved.model
    engine = scenario.engine
    return EngineConfig(
        device=machine.device,
        capabilities=machine.capabilities,
        overlap=overlaps(scenario),
        chunked_prefill_size=engine.chunked_prefill_size,
        mixed_chunk=engine.mixed_chunk,
        page_size=engine.page_size,
        radix_cache=engine.radix_cache,
        policy=engine.policy,
        max_running_requests=engine.max_running_requests,
        kv_tokens=engine.kv_tokens // engine.page_size * engine.page_size,
        context_len=model.max_positions,
        max_prefill_tokens=engine.max_prefill_tokens,
        schedule_conservativeness=engine.schedule_conservativeness,
        cuda_graph=engine.cuda_graph,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        seed=scenario.measure.seed,
        hisparse=_hisparse(resolved) if context.decodes else None,
        stages=engine.pipeline.stages,
        speculative=speculative_config(scenario.engine.speculative),
    )


def _hisparse(resolved: Resolved) -> HiSparseConfig | None:
    wanted, indexer = resolved.scenario.engine.hisparse, resolved.model.indexer
    if not wanted.enabled or indexer is None:
        return None
    return HiSparseConfig(wanted.buffer_size(indexer.top_k), wanted.host_ratio)


def compose(
    resolved: Resolved,
    *,
    choice: RelayChoice,
    machine: Machine,
    observer: Observer,
    clock: Clock,
    source: RequestSource,
    sampler: TokenSampler | None = None,
    guard: Guard | None = None,
    context: RankContext = ALONE,
) -> Composition:
    """``sampler`` replaces the scheduler's own; ``context`` is this rank's, where there are several. Raises
    CheckpointError when the scenario's checkpoint cannot be read."""
    config = engine_config(resolved, machine, context)
    streams = _streams(config, observer)
    # On the schedule's stream, for which every forward waits: no stream of ours waits for the default one.
    with streams.on(streams.schedule):
        slots, allocator = _slots(config), _allocator(config, config.logical_tokens)
        relay = _relay(choice, config, streams, slots, observer=observer, guard=guard)
        weights, pages = _weights(resolved, config.device, context), relay.context.pages
        decoder, tags, host, port = _model(resolved, config, weights, pages=pages, context=context)
        on_device = _allocator(config, config.kv_tokens)
        tier = kv_tier(host, allocator, on_device, slots=slots, streams=streams, observer=observer)
    cache = _cache(config, context, slots, allocator)
    sampler = sampler or Sampler()
    streams.wait(streams.forward, streams.schedule)
    with streams.on(streams.forward):
        runner: Runner = ModelRunner(decoder, config, context.proxies(resolved.model, tags))
        worker = draft_worker(
            resolved, config, decoder, weights, sampler=sampler, cache=cache, observer=observer, pages=pages
        )
    parts = transfer(
        resolved, context, hosted(port, host), tier, worker, cache=cache, streams=streams, observer=observer
    )
    engine = Engine(
        config=config,
        slots=slots,
        allocator=allocator,
        cache=cache,
        tier=tier,
        runner=runner if guard is None else guard.runner(runner),
        sampler=sampler,
        grammars=_Grammars(config),
        relay=relay,
        source=context.source(source),
        clock=clock,
        observer=observer,
        worker=worker if guard is None or worker is None else guard.worker(worker),
        link=context.link,
        stage=context.stage,
        share=context.share,
        **parts,
    )
    name_pools(machine, engine)
    return Composition(_scheduler(context)(engine), tags, None if host is None else host.buffers)


_WORKERS: Mapping[Role, type[Scheduler]] = {
    "replica": Replica,
    "prefill": PrefillWorker,
    "decode": DecodeWorker,
}


def _scheduler(context: RankContext) -> type[Scheduler]:
    if context.share is not None:
        return DataRank
    return Scheduler if context.place is None else _WORKERS[context.place.role]


def _streams(config: EngineConfig, observer: Observer) -> Streams:
    streams = Streams.of(config)
    for name in ("copy", "forward", "schedule"):  # the last name stays where all three are one
        observer.stream(name, getattr(streams, name))
    return streams


def _slots(config: EngineConfig) -> ReqToTokenPool:
    """Rows are longer than a context by what drafts may write behind its end."""
    overhang = 0 if config.speculative is None else config.speculative.overhang
    return ReqToTokenPool(config.max_running_requests, config.context_len + overhang, device=config.device)


def _relay(
    choice: RelayChoice,
    config: EngineConfig,
    streams: Streams,
    slots: ReqToTokenPool,
    *,
    observer: Observer,
    guard: Guard | None,
) -> Relay:
    mode = None if config.speculative is None else config.speculative.mode
    row = choice.row(overlap=config.overlap, speculation=mode, staged=config.stages > 1)
    drafts = choice.draft_row(mode)
    return Relay.of(
        row if guard is None else guard.row(row),
        config,
        streams=streams,
        observer=observer,
        req_to_token=slots.req_to_token,
        drafts=drafts if guard is None or drafts is None else guard.draft_row(drafts),
    )


def _allocator(config: EngineConfig, tokens: int) -> KVAllocator:
    if config.page_size == 1:
        return TokenAllocator(tokens, config.device)
    return PagedAllocator(tokens, config.page_size, device=config.device)


def _cache(
    config: EngineConfig, context: RankContext, slots: ReqToTokenPool, allocator: KVAllocator
) -> PrefixCache:
    shared = config.radix_cache and context.shares_prefixes
    return (RadixCache if shared else ChunkCache)(slots, allocator)


def _weights(resolved: Resolved, device: torch.device, context: RankContext) -> Weights:
    """The weights that this rank computes with."""
    weights = _layer_weights(resolved, device, context.layers(resolved.model))
    if context.share is None or resolved.scenario.engine.data_parallel.mlp == "replicated":
        return weights
    return sharded(weights, resolved.model, context.share)


def _layer_weights(resolved: Resolved, device: torch.device, layers: range) -> Weights:
    scenario, model = resolved.scenario, resolved.model
    if scenario.device.values == "none":
        return empty_weights(model, device=device, layers=layers)
    if resolved.checkpoint is None:
        return seeded_weights(model, seed=scenario.model.seed, device=device, layers=layers)
    return load_weights(resolved.checkpoint, model, device=device, layers=layers)


def _mlp(resolved: Resolved, context: RankContext) -> SharedMLP | None:
    if context.share is None or resolved.scenario.engine.data_parallel.mlp == "replicated":
        return None
    assert context.link is not None
    return SharedMLP(context.link, resolved.model, context.share)


def _model(
    resolved: Resolved,
    config: EngineConfig,
    weights: Weights,
    *,
    pages: torch.Tensor,
    context: RankContext,
) -> tuple[Model, TagPool | None, Host | None, KVPort]:
    """``pages`` is the table that forwards read. Tokens that are drawn by lot leave no tags to be checked."""
    model, scenario = resolved.model, resolved.scenario
    kv = kv_pool(replace(model, num_layers=len(context.layers(model))), config)
    tags, reuse = None, None
    if scenario.device.values == "none" and config.speculative is None:
        logical = config.logical_tokens + config.page_size
        tags = TagPool(slots=logical, context_len=config.context_len, device=config.device)
    if scenario.device.values == "none":
        reuse = scenario.engine.hisparse.selection.reuse
    host = host_side(config, model, kv, tags=tags, pages=pages)
    index = index_pool(config, model)
    sparse = sparse_attention(model, weights, kv, index=index, host=host, pages=pages, reuse=reuse)
    mlp = _mlp(resolved, context)
    whole = Decoder(model, weights, kv=kv, req_to_token=pages, sparse=sparse, mlp=mlp)
    decoder = whole if context.stage is None else StageDecoder(whole, context.stage)
    if tags is None:
        return decoder, None, host, KVPort(kv, None, index=index)
    places = None if host is None else host.places
    tagged = TaggedDecoder(decoder, pool=tags, req_to_token=pages, places=places)
    return tagged, tags, host, KVPort(kv, tags, index=index)
