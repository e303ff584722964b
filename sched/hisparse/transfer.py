"""Moves KV between device and host, by kernels that access pinned memory, and locates it for a forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..batch import ForwardBatch
from ..disagg.kv import KVPort, PageTableSpan
from ..kernels.hot_buffers import (
    SwapPlan,
    back_up,
    land_on_host,
    plan_swap_in,
    plan_unseen,
    preload,
    swap_in,
    translate,
)
from ..kernels.tags import fetch_tags, misplaced, move_tags
from ..memory.pools import KVPool
from ..model.tags import TagPool
from .pools import HostPool, HotBuffers


class TierTags:
    """With values none: a tag for each slot of the device and for each slot of the host pool, all on the device. Tags
    are moved along with KV, and the tokens that a decode attends to are checked. Since nothing is scored, all layers
    select the same tokens, and the first layer represents all."""

    def __init__(self, pool: TagPool, *, slots: int, host_slots: int) -> None:
        self.pool = pool
        self.device_tags = pool.tags.new_zeros(slots)
        self.host_tags = pool.tags.new_zeros(host_slots)


class KVTransfer:
    """Copies between the slots of a pool on the device and those of the host, on the current stream. With values none
    ``tags`` are moved along with KV."""

    def __init__(self, kv: KVPool, host: HostPool, tags: TierTags | None) -> None:
        self._kv = kv
        self._host = host
        self._tags = tags

    def back_up(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        """Copy all layers of the device ``slots`` [n] int64 to ``host_slots`` [n] int64. ABSENT slots are skipped."""
        back_up(self._kv.k_cache, self._kv.v_cache, self._host.storage, slots, host_slots)
        if self._tags is not None:
            move_tags(self._tags.host_tags, host_slots, self._tags.device_tags, slots)

    def write_host(self, kv: torch.Tensor, host_slots: torch.Tensor) -> None:
        """Write KV received from another worker, [2 · layers, n, kv_heads, d], to ``host_slots`` [n] int64."""
        land_on_host(self._host.storage, host_slots, kv)

    def tag(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """Tag ``host_slots`` [n] int64, which have received the KV of the logical ``slots`` [n] int64."""
        if self._tags is not None:
            move_tags(self._tags.host_tags, host_slots, self._tags.pool.tags, slots)

    def preload(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        """Copy all layers of ``host_slots`` [n] int64 to the device ``slots`` [n] int64."""
        preload(self._kv.k_cache, self._kv.v_cache, self._host.storage, slots, host_slots)
        if self._tags is not None:
            move_tags(self._tags.device_tags, slots, self._tags.host_tags, host_slots)

    def swap_in(
        self, layer: int, plan: SwapPlan, host_slots: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> None:
        """Fetch the tokens of ``plan`` that the layer's buffers lack. ``host_slots`` [rows, context] int64 maps
        positions to slots of the host."""
        swap_in(
            self._kv.k_cache[layer],
            self._kv.v_cache[layer],
            self._host.layer(layer),
            host_slots,
            req_pool_indices,
            plan.missing,
            plan.targets,
        )
        if layer == 0 and self._tags is not None:
            tags, moved = self._tags, (host_slots, req_pool_indices, plan.missing, plan.targets)
            fetch_tags(tags.device_tags, tags.host_tags, *moved)


class HotBufferLocator:
    """The ``KVLocator`` of hot buffers. Prompts are completely on the device; a decode's selected tokens are in the
    request's hot buffer, or are fetched to it.

    Every layer selects different tokens, so every layer has its own buffer contents, in the same slots of its own
    cache. With ``tags`` all layers select the same tokens, and only the first layer's buffers are kept; the slots that
    the current forward writes and reads are remembered for ``settle``.
    """

    def __init__(
        self, buffers: HotBuffers, transfer: KVTransfer, tags: TierTags | None, req_to_token: torch.Tensor
    ) -> None:
        self._buffers = buffers
        self._transfer = transfer
        self._tags = tags
        self._req_to_token = req_to_token
        self._slots: torch.Tensor | None = None
        self._read: tuple[torch.Tensor, SwapPlan] | None = None  # positions and their locations

    @property
    def mapping(self) -> torch.Tensor:
        return self._buffers.mapping

    def write_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots: torch.Tensor = translate(self._buffers.mapping, batch.out_cache_loc)
        self._slots, self._read = slots, None
        return slots

    def read_slots(self, layer: int, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        buffers, own = self._buffers, layer if self._tags is None else 0
        lookup = (
            positions,
            batch.req_pool_indices,
            batch.seq_lens,
            buffers.device_buffer,
            buffers.tokens[own],
            buffers.lru[own],
            buffers.lookups,
            batch.max_seq_len,
        )
        if self._read is None:
            plan = SwapPlan(*plan_swap_in(*lookup))
            self._read = None if self._tags is None else (positions, plan)
        else:
            plan_unseen(*lookup)
            _, plan = self._read
        self._transfer.swap_in(layer, plan, buffers.host_slots, batch.req_pool_indices)
        return plan.locations

    def settle(self, batch: ForwardBatch, fingerprint: torch.Tensor) -> None:
        """Tag the locations of the KV of a forward's tokens, and change the fingerprints [b] int64 of requests that
        attended to a wrong location."""
        tags = self._tags
        assert tags is not None, "only with values none is a fingerprint computed"
        move_tags(tags.device_tags, self._slots, tags.pool.tags, batch.out_cache_loc)
        if self._read is not None:
            positions, plan = self._read
            misplaced(
                fingerprint,
                tags.device_tags,
                tags.pool.tags,
                tags.pool.weights,
                self._req_to_token,
                batch.req_pool_indices,
                positions,
                plan.locations,
            )


class HostKVPort:
    """The ``KVGateway`` through which KV that other workers have computed reaches the host. It only receives.
    ``device_port`` writes what stays on the device."""

    def __init__(self, device_port: KVPort, buffers: HotBuffers, transfer: KVTransfer) -> None:
        self._device_port = device_port
        self._buffers = buffers
        self._transfer = transfer

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        raise AssertionError(f"{slots.shape[0]} tokens whose KV is on the host are not gathered")

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:
        host_slots = self._buffers.host_slots[span.row, span.start : span.start + span.slots.shape[0]]
        self._transfer.write_host(values[0], host_slots)
        self._device_port.scatter(span, values[1:], first=1)
        self._transfer.tag(host_slots, span.slots)
