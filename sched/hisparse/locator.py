"""How a forward finds KV that lies partly on the host."""

from __future__ import annotations

import torch

from ..batch import ForwardBatch
from ..kernels.buffers import translate
from ..kernels.swap import SwapPlan, plan_swap_in
from .pools import HotBuffers
from .transfer import HostTransfer


class HotBufferLocator:
    """Prompts lie whole on the device; a decode's chosen tokens are in the request's hot buffer, or are fetched there.

    Every layer has chosen other tokens, so every layer has its own buffer contents in the same slots of its own cache.
    """

    def __init__(self, buffers: HotBuffers, transfer: HostTransfer) -> None:
        self._buffers = buffers
        self._transfer = transfer

    @property
    def mapping(self) -> torch.Tensor:
        return self._buffers.mapping

    def written(self, batch: ForwardBatch) -> torch.Tensor:
        slots: torch.Tensor = translate(self._buffers.mapping, batch.out_cache_loc)
        return slots

    def located(self, layer: int, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        buffers = self._buffers
        plan = SwapPlan(*plan_swap_in(*asked(buffers, layer, positions, batch)))
        self._transfer.swap_in(layer, plan, buffers.host_slots, batch.req_pool_indices)
        return plan.locations


def asked(
    buffers: HotBuffers, layer: int, positions: torch.Tensor, batch: ForwardBatch
) -> tuple[object, ...]:
    """The arguments of a swap-in's plan."""
    return (
        positions,
        batch.req_pool_indices,
        batch.seq_lens,
        buffers.device_buffer,
        buffers.tokens[layer],
        buffers.lru[layer],
        buffers.lookups,
        batch.max_seq_len,
    )
