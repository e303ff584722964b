"""Locates KV that is partly on the host for a forward."""

from __future__ import annotations

import torch

from ..batch import ForwardBatch
from ..kernels.buffers import translate
from ..kernels.swap import SwapPlan, plan_swap_in
from .pools import HotBuffers
from .transfer import HostTransfer


class HotBufferLocator:
    """The ``KVLocator`` of hot buffers. Prompts are completely on the device; a decode's selected tokens are in the
    request's hot buffer, or are fetched to it.

    Every layer selects different tokens, so every layer has its own buffer contents, in the same slots of its own
    cache.
    """

    def __init__(self, buffers: HotBuffers, transfer: HostTransfer) -> None:
        self._buffers = buffers
        self._transfer = transfer

    @property
    def mapping(self) -> torch.Tensor:
        return self._buffers.mapping

    def write_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots: torch.Tensor = translate(self._buffers.mapping, batch.out_cache_loc)
        return slots

    def read_slots(self, layer: int, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        buffers = self._buffers
        plan = SwapPlan(*plan_swap_in(*swap_in_arguments(buffers, layer, positions, batch)))
        self._transfer.swap_in(layer, plan, buffers.host_slots, batch.req_pool_indices)
        return plan.locations


def swap_in_arguments(
    buffers: HotBuffers, layer: int, positions: torch.Tensor, batch: ForwardBatch
) -> tuple[object, ...]:
    """The arguments of ``plan_swap_in``."""
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
