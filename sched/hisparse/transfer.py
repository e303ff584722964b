"""Moves KV between device and host, by kernels that access pinned memory."""

from __future__ import annotations

from typing import Protocol

import torch

from ..kernels.arrival import land_on_host
from ..kernels.backup import back_up, preload
from ..kernels.swap import SwapPlan, swap_in
from ..memory.kv import KVPool
from .pools import HostPool


class HostTransfer(Protocol):
    def back_up(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        """Copy all layers of the device ``slots`` [n] int64 to ``host_slots`` [n] int64, on the current stream. ABSENT
        slots are skipped."""

    def write_host(self, kv: torch.Tensor, host_slots: torch.Tensor) -> None:
        """Write KV received from another worker, [layers, 2, n, kv_heads, d], to ``host_slots`` [n] int64."""

    def preload(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        """Copy all layers of ``host_slots`` [n] int64 to the device ``slots`` [n] int64."""

    def swap_in(
        self, layer: int, plan: SwapPlan, host_slots: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> None:
        """Fetch the tokens of ``plan`` that the layer's buffers lack, on the current stream. ``host_slots`` [rows,
        context] int64 maps positions to slots of the host."""


class KVTransfer:
    def __init__(self, kv: KVPool, host: HostPool) -> None:
        self._kv = kv
        self._host = host

    def back_up(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        back_up(self._kv.k_cache, self._kv.v_cache, self._host.storage, slots, host_slots)

    def write_host(self, kv: torch.Tensor, host_slots: torch.Tensor) -> None:
        land_on_host(self._host.storage, host_slots, kv)

    def preload(self, slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        preload(self._kv.k_cache, self._kv.v_cache, self._host.storage, slots, host_slots)

    def swap_in(
        self, layer: int, plan: SwapPlan, host_slots: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> None:
        swap_in(
            self._kv.k_cache[layer],
            self._kv.v_cache[layer],
            self._host.layer(layer),
            host_slots,
            req_pool_indices,
            plan.missing,
            plan.targets,
        )
