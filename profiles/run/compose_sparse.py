"""The parts of an engine whose model attends to chosen tokens, and those that keep its KV on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...sched.config import EngineConfig, HiSparseConfig
from ...sched.hisparse.coordinator import Coordinator
from ...sched.hisparse.locator import HotBufferLocator
from ...sched.hisparse.pools import HostPool, HotBuffers
from ...sched.hisparse.tagged import TaggedLocator, TaggedTransfer, TierTags
from ...sched.hisparse.tier import KVTier
from ...sched.hisparse.transfer import HostTransfer, KVTransfer
from ...sched.memory.index import IndexPool
from ...sched.memory.kv import KVPool
from ...sched.memory.slots import ReqToTokenPool
from ...sched.memory.tokens import KVAllocator
from ...sched.model.config import ModelConfig
from ...sched.model.sparse import KVLocator, PageTableLocator, SparseAttention
from ...sched.model.tags import TagPool, TagResidence
from ...sched.model.weights import Weights
from ...sched.observe import Observer
from ...sched.streams import Streams
from ..vgpu.pinned import pin


@dataclass(frozen=True, slots=True)
class Host:
    """KV's way to the host and back, and what is known of where it lies."""

    pool: HostPool
    buffers: HotBuffers
    transfer: HostTransfer
    residence: KVLocator
    places: TagResidence | None  # only with values none
    tag: Callable[[torch.Tensor, torch.Tensor], None] | None  # so is it: what ``HostKVPort`` tells


def host_side(
    config: EngineConfig,
    model: ModelConfig,
    kv: KVPool,
    *,
    tags: TagPool | None,
    pages: torch.Tensor,
) -> Host | None:
    """None where all KV is on the device. ``tags`` is there with values none, ``pages`` is the table that forwards
    read."""
    if config.hisparse is None:
        return None
    pool = HostPool(_host_memory(config, model, held=tags is None), config.page_size)
    # Where nothing is scored all layers choose alike, and the first one's buffers stand for all.
    buffers = _buffers(config, config.hisparse, layers=model.num_layers if tags is None else 1)
    transfer = KVTransfer(kv, pool)
    if tags is None:
        return Host(pool, buffers, transfer, HotBufferLocator(buffers, transfer), None, None)
    places = TierTags(tags, slots=kv.slots, host_slots=pool.storage.shape[0])
    tagged = TaggedTransfer(transfer, places)
    residence = TaggedLocator(buffers, tagged, places, pages)
    return Host(pool, buffers, tagged, residence, residence, tagged.tag)


def index_pool(config: EngineConfig, model: ModelConfig) -> IndexPool | None:
    """None for a model that attends to all tokens."""
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
    model: ModelConfig,
    weights: Weights,
    kv: KVPool,
    *,
    index: IndexPool | None,
    host: Host | None,
    pages: torch.Tensor,
    reuse: float | None,
) -> SparseAttention | None:
    """None for a model that attends to all tokens."""
    indexer = model.indexer
    if indexer is None or index is None:
        return None
    return SparseAttention(
        model,
        indexer,
        weights,
        kv=kv,
        index=index,
        req_to_token=pages,
        residence=PageTableLocator(pages) if host is None else host.residence,
        reuse=reuse,
    )


def kv_tier(
    host: Host | None,
    allocator: KVAllocator,
    device_allocator: KVAllocator,
    *,
    slots: ReqToTokenPool,
    streams: Streams,
    observer: Observer,
) -> KVTier:
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


def _host_memory(config: EngineConfig, model: ModelConfig, *, held: bool) -> torch.Tensor:
    """Pinned; where floats are skipped, memory that nobody holds."""
    tokens = config.logical_tokens + config.page_size
    shape = (tokens, model.num_layers, 2, model.num_kv_heads, model.head_dim)
    if held:
        return torch.zeros(shape, dtype=model.dtype, pin_memory=True)
    return pin(torch.empty(shape, dtype=model.dtype, device="meta"))


def _buffers(config: EngineConfig, hisparse: HiSparseConfig, *, layers: int) -> HotBuffers:
    return HotBuffers(
        hisparse,
        rows=config.max_running_requests + 1,
        layers=layers,
        slots=config.logical_tokens + config.page_size,
        context_len=config.context_len,
        page_size=config.page_size,
        device=config.device,
    )
