"""Moves KV between device and host, by kernels that access pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..disagg.kv import KVPort, PageTableSpan
from ..kernels.backup import back_up, land_on_host, preload
from ..kernels.swap import SwapPlan, swap_in
from ..memory.pools import KVPool
from .pools import HostPool, HotBuffers


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


class HostKVPort:
    """A ``KVGateway`` that only receives. ``device_port`` writes what stays on the device. With values none ``tag`` is
    called with the host slots [n] int64 and the logical slots [n] int64 of received KV."""

    def __init__(
        self,
        device_port: KVPort,
        buffers: HotBuffers,
        transfer: HostTransfer,
        tag: Callable[[torch.Tensor, torch.Tensor], None] | None,
    ) -> None:
        self._device_port = device_port
        self._buffers = buffers
        self._transfer = transfer
        self._tag = tag

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        raise AssertionError(f"{slots.shape[0]} tokens whose KV is on the host are not gathered")

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:
        host_slots = self._buffers.host_slots[span.row, span.start : span.start + span.slots.shape[0]]
        self._transfer.write_host(values[0], host_slots)
        self._device_port.scatter_rest(span, values[1:])
        if self._tag is not None:
            self._tag(host_slots, span.slots)
