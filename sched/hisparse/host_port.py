"""The port through which KV that other workers have computed reaches the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..disagg.kv import KVPort, PageTableSpan
from .pools import HotBuffers
from .transfer import HostTransfer


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
