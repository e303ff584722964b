"""The model of a rank: its weights, the pools of its KV on the device and on the host, and what its forwards run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...sched.config import EngineConfig
from ...sched.data_parallel.mlp import SharedMLP, sharded
from ...sched.disagg.kv import KVPort
from ...sched.hisparse.coordinator import Coordinator
from ...sched.hisparse.pools import HostPool, HotBuffers
from ...sched.hisparse.transfer import HostKVPort, HotBufferLocator, KVTransfer, TierTags
from ...sched.memory.pools import IndexPool, KVAllocator, KVPool, ReqToTokenPool
from ...sched.memory.tier import KVTier
from ...sched.model.checkpoint import load_weights
from ...sched.model.config import ModelConfig
from ...sched.model.decoder import BlockDecoder, CrossDecoder, Decoder, Embedder, Model
from ...sched.model.draft import (
    DraftWeights,
    EagleDraft,
    derived_weights,
    empty_draft_weights,
    load_draft_weights,
)
from ...sched.model.runner import GraphInput
from ...sched.model.sampling import TokenSampler
from ...sched.model.sparse import KVLocator, PageTableLocator, SparseAttention
from ...sched.model.tags import TaggedDecoder, TagPool
from ...sched.model.weights import Weights, empty_weights, seeded_weights
from ...sched.observe import Observer
from ...sched.pipeline import StageDecoder
from ...sched.speculate.drafter import Drafter
from ...sched.speculate.verifier import Verifier, acceptance
from ...sched.speculate.worker import Worker
from ...sched.streams import Streams
from ..platform.resolve import Resolved
from ..vgpu.tensor import pin
from .rank_context import RankContext


@dataclass(frozen=True, slots=True)
class HostKV:
    """KV on the host: its pool, the hot buffers on the device, and the copies between them."""

    pool: HostPool
    buffers: HotBuffers
    transfer: KVTransfer
    locator: HotBufferLocator


@dataclass(frozen=True, slots=True)
class ModelParts:
    """``tags`` with values none only, ``host`` with KV on the host only. ``port``: by which KV is transferred."""

    weights: Weights
    decoder: Model
    port: KVPort | HostKVPort
    tags: TagPool | None
    host: HostKV | None


def model_parts(
    resolved: Resolved, config: EngineConfig, pages: torch.Tensor, context: RankContext
) -> ModelParts:
    """``pages`` is the table that forwards read. With simulated acceptance there are no tags to be checked. Raises
    CheckpointError."""
    model, scenario = resolved.model, resolved.scenario
    weights = model_weights(resolved, config.device, context)
    kv = kv_pool(replace(model, num_layers=len(context.layers(model))), config)
    tags = None
    if scenario.device.values == "none" and config.speculative is None:
        logical = config.logical_tokens + config.page_size
        tags = TagPool(slots=logical, context_len=config.context_len, device=config.device)
    host = _host_kv(config, model, kv, tags=tags, pages=pages)
    index, locator = index_pool(resolved, config), None if host is None else host.locator
    sparse = sparse_attention(resolved, index=index, pages=pages, locator=locator)
    mlp = _mlp(resolved, context)
    whole = _decoder_class(config)(model, weights, kv=kv, req_to_token=pages, sparse=sparse, mlp=mlp)
    decoder: Model = whole if context.stage is None else StageDecoder(whole, context.stage)
    if tags is not None:
        places = None if host is None else host.locator
        decoder = TaggedDecoder(decoder, pool=tags, req_to_token=pages, places=places)
    on_device = KVPort(tags, kv.caches, *([] if index is None else [index.k_cache]))
    port = on_device if host is None else HostKVPort(on_device, host.buffers, host.transfer)
    return ModelParts(weights, decoder, port, tags, host)


def index_pool(resolved: Resolved, config: EngineConfig) -> IndexPool | None:
    """The keys of the model's indexer; None for a model whose attention is dense."""
    model = resolved.model
    if model.indexer is None:
        return None
    return IndexPool(
        num_layers=model.num_layers,
        slots=config.logical_tokens + config.page_size,
        head_dim=model.indexer.head_dim,
        dtype=model.dtype,
        device=config.device,
    )


def sparse_attention(
    resolved: Resolved, *, index: IndexPool | None, pages: torch.Tensor, locator: KVLocator | None
) -> SparseAttention | None:
    """None without an index. Without ``locator`` KV is in the slots of the table ``pages``."""
    model, scenario = resolved.model, resolved.scenario
    if index is None or model.indexer is None:
        return None
    return SparseAttention(
        model,
        model.indexer,
        index=index,
        req_to_token=pages,
        locator=locator or PageTableLocator(pages),
        reuse=scenario.engine.hisparse.selection.reuse if scenario.device.values == "none" else None,
    )


def _decoder_class(config: EngineConfig) -> type[Decoder]:
    if config.encoder:
        return CrossDecoder
    if config.blocks is not None:
        return BlockDecoder
    return Embedder if config.embedding else Decoder


def model_weights(resolved: Resolved, device: torch.device, context: RankContext) -> Weights:
    """The weights that this rank computes with."""
    scenario, model, layers = resolved.scenario, resolved.model, context.layers(resolved.model)
    if scenario.device.values == "none":
        weights = empty_weights(model, device=device, layers=layers)
    elif resolved.checkpoint is None:
        weights = seeded_weights(model, seed=scenario.model.seed, device=device, layers=layers)
    else:
        weights = load_weights(resolved.checkpoint, model, device=device, layers=layers)
    if context.share is None or scenario.engine.data_parallel.mlp == "replicated":
        return weights
    return sharded(weights, model, context.share)


def kv_pool(model: ModelConfig, config: EngineConfig) -> KVPool:
    """The KV of the model's layers on the device."""
    return KVPool(
        num_layers=model.num_layers,
        tokens=config.kv_tokens,
        page_size=config.page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        device=config.device,
    )


def _host_kv(
    config: EngineConfig, model: ModelConfig, kv: KVPool, *, tags: TagPool | None, pages: torch.Tensor
) -> HostKV | None:
    """None where all KV is on the device. Pinned memory; with values none its shape only."""
    if config.hisparse is None:
        return None
    slots = config.logical_tokens + config.page_size
    shape = (slots, model.num_layers, 2, model.num_kv_heads, model.head_dim)
    if tags is None:
        memory = torch.zeros(shape, dtype=model.dtype, pin_memory=True)
    else:
        memory = pin(torch.empty(shape, dtype=model.dtype, device="meta"))
    pool = HostPool(memory, config.page_size)
    buffers = HotBuffers(
        config.hisparse,
        rows=config.max_running_requests + 1,
        # Where nothing is scored all layers choose the same tokens, and the first one's buffers stand for all.
        layers=model.num_layers if tags is None else 1,
        slots=slots,
        context_len=config.context_len,
        page_size=config.page_size,
        device=config.device,
    )
    places = None if tags is None else TierTags(tags, slots=kv.slots, host_slots=pool.storage.shape[0])
    transfer = KVTransfer(kv, pool, places)
    return HostKV(pool, buffers, transfer, HotBufferLocator(buffers, transfer, places, pages))


def _mlp(resolved: Resolved, context: RankContext) -> SharedMLP | None:
    if context.share is None or resolved.scenario.engine.data_parallel.mlp == "replicated":
        return None
    assert context.link is not None
    return SharedMLP(context.link, resolved.model, context.share)


def kv_tier(
    host: HostKV | None,
    allocator: KVAllocator,
    device_allocator: KVAllocator,
    *,
    slots: ReqToTokenPool,
    streams: Streams,
    observer: Observer,
) -> KVTier:
    """Where KV is: on the device alone, or on the host with hot buffers on the device."""
    if host is None:
        return KVTier(allocator)
    coordinator = Coordinator(
        allocator=allocator,
        device_allocator=device_allocator,
        slots=slots,
        buffers=host.buffers,
        host=host.pool,
        transfer=host.transfer,
        streams=streams,
    )
    observer.stream("staging", coordinator.staging_stream)
    observer.stream("backup", coordinator.backup_stream)
    return coordinator


def draft_worker(
    resolved: Resolved,
    config: EngineConfig,
    model: ModelParts,
    *,
    sampler: TokenSampler,
    pages: torch.Tensor,
) -> Worker | None:
    """None for a scenario that does not speculate. Captures graphs on the current stream. Raises CheckpointError when
    the draft's checkpoint cannot be read."""
    if config.speculative is None or resolved.draft is None:
        return None
    kv = kv_pool(resolved.draft, config)
    draft = EagleDraft(
        resolved.draft, draft_weights(resolved, resolved.draft, model.weights), kv=kv, req_to_token=pages
    )
    hidden = GraphInput((resolved.model.hidden_size,), resolved.model.dtype)
    return Worker(
        spec=config.speculative,
        drafter=Drafter(draft, config, pages=pages, hidden=hidden),
        verifier=Verifier(model.decoder, sampler, config, pages=pages),
        acceptance=acceptance(config),
        kv=kv,
    )


def draft_weights(resolved: Resolved, draft: ModelConfig, target: Weights) -> DraftWeights:
    """The weights of the draft model. Raises CheckpointError."""
    if resolved.scenario.device.values == "none":
        return empty_draft_weights(draft, target)
    if resolved.draft_checkpoint is None:
        return derived_weights(draft, target)
    return load_draft_weights(resolved.draft_checkpoint, draft, target)
