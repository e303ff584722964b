"""Hot buffers with values none: tags are moved along with KV, and the tokens that a decode attends to are checked.

Since nothing is scored, all layers select the same tokens, and the first layer represents all.
"""

from __future__ import annotations

import torch

from ..batch import ForwardBatch
from ..kernels.swap import SwapPlan, plan_swap_in, plan_unseen
from ..kernels.tags import fetch_tags, misplaced, move_tags
from ..memory.pools import KVPool
from ..model.tags import TagPool
from .pools import HostPool, HotBuffers
from .transfer import HotBufferLocator, KVTransfer, swap_in_arguments


class TierTags:
    """A tag for each slot of the device and for each slot of the host pool, all on the device."""

    def __init__(self, pool: TagPool, *, slots: int, host_slots: int) -> None:
        self.pool = pool
        self.device_tags = pool.tags.new_zeros(slots)
        self.host_tags = pool.tags.new_zeros(host_slots)


class TaggedTransfer(KVTransfer):
    """Moves tags along with KV."""

    def __init__(self, kv: KVPool, host: HostPool, tags: TierTags) -> None:
        super().__init__(kv, host)
        self._tags = tags

    def back_up(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        super().back_up(slots, host_slots)
        move_tags(self._tags.host_tags, host_slots, self._tags.device_tags, slots)

    def preload(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        super().preload(slots, host_slots)
        move_tags(self._tags.device_tags, slots, self._tags.host_tags, host_slots)

    def tag(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        move_tags(self._tags.host_tags, host_slots, self._tags.pool.tags, slots)

    def swap_in(
        self, layer: int, plan: SwapPlan, host_slots: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> None:
        super().swap_in(layer, plan, host_slots, req_pool_indices)
        if layer == 0:
            tags = self._tags
            fetch_tags(
                tags.device_tags, tags.host_tags, host_slots, req_pool_indices, plan.missing, plan.targets
            )


class TaggedLocator(HotBufferLocator):
    """With values none: only the first layer's buffers are kept. Remembers which slots the current
    forward writes and reads, for ``settle``."""

    def __init__(
        self, buffers: HotBuffers, transfer: TaggedTransfer, tags: TierTags, req_to_token: torch.Tensor
    ) -> None:
        super().__init__(buffers, transfer)
        self._tags = tags
        self._req_to_token = req_to_token
        self._slots: torch.Tensor | None = None
        self._read: tuple[torch.Tensor, SwapPlan] | None = None  # positions and their locations

    def write_slots(self, batch: ForwardBatch) -> torch.Tensor:
        self._read = None
        self._slots = super().write_slots(batch)
        return self._slots

    def read_slots(self, layer: int, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        buffers = self._buffers
        arguments = swap_in_arguments(buffers, 0, positions, batch)
        if self._read is None:
            self._read = positions, SwapPlan(*plan_swap_in(*arguments))
        else:
            plan_unseen(*arguments)
        plan = self._read[1]
        self._transfer.swap_in(layer, plan, buffers.host_slots, batch.req_pool_indices)
        return plan.locations

    def settle(self, batch: ForwardBatch, fingerprint: torch.Tensor) -> None:
        tags, pool = self._tags, self._tags.pool
        move_tags(tags.device_tags, self._slots, pool.tags, batch.out_cache_loc)
        if self._read is not None:
            positions, plan = self._read
            misplaced(
                fingerprint,
                tags.device_tags,
                pool.tags,
                pool.weights,
                self._req_to_token,
                batch.req_pool_indices,
                positions,
                plan.locations,
            )
