"""With values none: tags move where KV moves, and what a decode attends to is checked.

All layers choose alike where nothing is scored, so the first one stands for all.
"""

from __future__ import annotations

import torch

from ..batch import ForwardBatch
from ..kernels.buffers import translate
from ..kernels.swap import SwapPlan, plan_swap_in, plan_unseen
from ..kernels.tier_tags import fetch_tags, misplaced, move_tags
from ..model.tags import TagPool
from .locator import asked
from .pools import HotBuffers
from .transfer import HostTransfer


class TierTags:
    """One tag per slot on the device and, on the device too, per slot of the host pool."""

    def __init__(self, pool: TagPool, *, slots: int, host_slots: int) -> None:
        self.pool = pool
        self.device_tags = pool.tags.new_zeros(slots)
        self.host_tags = pool.tags.new_zeros(host_slots)


class TaggedTransfer:
    """``transfer``, and the tags with it."""

    def __init__(self, transfer: HostTransfer, tags: TierTags) -> None:
        self._transfer = transfer
        self._tags = tags

    def back_up(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        self._transfer.back_up(slots, host_slots)
        move_tags(self._tags.host_tags, host_slots, self._tags.device_tags, slots)

    def land(self, kv: torch.Tensor, host_slots: torch.Tensor) -> None:
        self._transfer.land(kv, host_slots)

    def preload(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        self._transfer.preload(slots, host_slots)
        move_tags(self._tags.device_tags, slots, self._tags.host_tags, host_slots)

    def tag(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """What came to ``host_slots`` [n] int64 belongs to the logical ``slots`` [n] int64."""
        move_tags(self._tags.host_tags, host_slots, self._tags.pool.tags, slots)

    def swap_in(
        self, layer: int, plan: SwapPlan, host_slots: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> None:
        self._transfer.swap_in(layer, plan, host_slots, req_pool_indices)
        if layer == 0:
            tags = self._tags
            fetch_tags(
                tags.device_tags, tags.host_tags, host_slots, req_pool_indices, plan.missing, plan.targets
            )


class TaggedLocator:
    """``HotBufferLocator`` where all layers choose what the first one does: that one's buffers are the only ones that
    are kept, and it is remembered where the forward under way wrote and read."""

    def __init__(
        self, buffers: HotBuffers, transfer: HostTransfer, tags: TierTags, req_to_token: torch.Tensor
    ) -> None:
        self._buffers = buffers
        self._transfer = transfer
        self._tags = tags
        self._req_to_token = req_to_token
        self._slots: torch.Tensor | None = None
        self._read: tuple[torch.Tensor, SwapPlan] | None = None  # positions, and where they are

    @property
    def mapping(self) -> torch.Tensor:
        return self._buffers.mapping

    def written(self, batch: ForwardBatch) -> torch.Tensor:
        self._read = None
        self._slots = translate(self._buffers.mapping, batch.out_cache_loc)
        return self._slots

    def located(self, layer: int, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        buffers = self._buffers
        arguments = asked(buffers, 0, positions, batch)
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
