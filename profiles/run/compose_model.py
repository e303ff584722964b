"""The model of a rank: its weights, the pools of its KV on the device and on the host, and what its forwards run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...sched.config import EngineConfig
from ...sched.data_parallel.mlp import SharedMLP, sharded
from ...sched.disagg.kv import KVPort
from ...sched.hisparse.coordinator import Coordinator
from ...sched.hisparse.pools import HostPool, HotBuffers
from ...sched.hisparse.transfer import HotBufferLocator, KVTransfer, TierTags
from ...sched.memory.pools import IndexPool, KVAllocator, KVPool, ReqToTokenPool
from ...sched.memory.tier import KVTier
from ...sched.model.checkpoint import load_weights
from ...sched.model.config import ModelConfig
from ...sched.model.decoder import BlockDecoder, CrossDecoder, Decoder, Embedder, Model
from ...sched.model.draft import EagleDraft, derived_weights, empty_draft_weights, load_draft_weights
from ...sched.model.runner import GraphInput
from ...sched.model.sampling import Sampler
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


class RankModel:
    """A rank's part of the model, and its KV on the device, unless that is given as ``kv``. ``locator``: where a slot's
    KV is, if not in the slot. ``tags`` with values none only; with simulated acceptance there are none to be checked.
    Raises CheckpointError."""

    def __init__(
        self,
        resolved: Resolved,
        config: EngineConfig,
        context: RankContext,
        *,
        kv: KVPool | None = None,
        locator: KVLocator | None = None,
    ) -> None:
        self.config = config
        self.tags: TagPool | None = None
        self.resolved, self._context, self._locator = resolved, context, locator
        model, scenario = resolved.model, resolved.scenario
        slots = config.logical_tokens + config.page_size
        self._weights = model_weights(resolved, config.device, context)
        self.kv = kv or kv_pool(replace(model, num_layers=len(context.layers(model))), config)
        if scenario.device.values == "none" and config.speculative is None:
            self.tags = TagPool(slots=slots, context_len=config.context_len, device=config.device)
        self._index = (
            None
            if model.indexer is None
            else IndexPool(
                num_layers=model.num_layers,
                slots=slots,
                head_dim=model.indexer.head_dim,
                dtype=model.dtype,
                device=config.device,
            )
        )

    def decoder(self, pages: torch.Tensor, places: HotBufferLocator | None = None) -> Model:
        """The decoder that finds KV slots in the table ``pages``, [rows, context] int32, and with ``places`` in hot
        buffers. Launches nothing."""
        decoder, stage = self.bare_decoder(pages, places), self._context.stage
        return self.tagged(decoder if stage is None else StageDecoder(decoder, stage), pages, places)

    def bare_decoder(self, pages: torch.Tensor, places: HotBufferLocator | None = None) -> Decoder:
        """The decoder without tags."""
        model, scenario, sparse = self.resolved.model, self.resolved.scenario, None
        if self._index is not None and model.indexer is not None:
            sparse = SparseAttention(
                model,
                model.indexer,
                index=self._index,
                req_to_token=pages,
                locator=places or self._locator or PageTableLocator(pages),
                reuse=scenario.engine.hisparse.selection.reuse if scenario.device.values == "none" else None,
            )
        mlp = _mlp(self.resolved, self._context)
        kind = _decoder_class(self.config)
        return kind(model, self._weights, kv=self.kv, req_to_token=pages, sparse=sparse, mlp=mlp)

    def tagged(self, model: Model, pages: torch.Tensor, places: HotBufferLocator | None = None) -> Model:
        """With values none, a model that makes the launches of ``model`` and fingerprints from tags."""
        if self.tags is None:
            return model
        settle = None if places is None else places.settle
        return TaggedDecoder(model, pool=self.tags, req_to_token=pages, settle=settle)

    def port(self) -> KVPort:
        """Reads and writes KV in the slots, and with values none the tags that stand for it."""
        index = [] if self._index is None else [self._index.k_cache]
        return KVPort(self.tags, self.kv.caches, *index)

    def draft(self, pages: torch.Tensor) -> EagleDraft:
        """The draft model of a scenario that speculates; its KV is in the same slots of a pool of its own. Raises
        CheckpointError."""
        draft, target = self.resolved.draft, self._weights
        assert draft is not None
        if self.resolved.scenario.device.values == "none":
            weights = empty_draft_weights(draft, target)
        elif self.resolved.draft_checkpoint is None:
            weights = derived_weights(draft, target)
        else:
            weights = load_draft_weights(self.resolved.draft_checkpoint, draft, target)
        return EagleDraft(draft, weights, kv=kv_pool(draft, self.config), req_to_token=pages)


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


def host_kv(made: RankModel, pages: torch.Tensor) -> HostKV | None:
    """None where all KV is on the device. Pinned memory; with values none its shape only. ``pages`` is the table that
    forwards read."""
    model, config, kv, tags = made.resolved.model, made.config, made.kv, made.tags
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


def draft_worker(made: RankModel, target: Model, *, sampler: Sampler, pages: torch.Tensor) -> Worker | None:
    """None for a scenario that does not speculate. Captures graphs on the current stream. Raises CheckpointError when
    the draft's checkpoint cannot be read."""
    config, model = made.config, made.resolved.model
    if config.speculative is None:
        return None
    draft, hidden = made.draft(pages), GraphInput((model.hidden_size,), model.dtype)
    return Worker(
        spec=config.speculative,
        drafter=Drafter(draft, config, pages=pages, hidden=hidden),
        verifier=Verifier(target, sampler, config, pages=pages),
        acceptance=acceptance(config),
        kv=draft.kv,
    )
