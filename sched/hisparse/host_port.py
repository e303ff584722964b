"""KV that other workers have computed, on its way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..disagg.kv import KVPort, PageTableSpan
from .pools import HotBuffers
from .transfer import HostTransfer


class HostKVPort:
    """A ``Port`` into which KV only comes. ``beside`` takes what goes with it; ``tag`` is there with values none: it is
    told which host slots [n] int64 are whose logical slots [n] int64."""

    def __init__(
        self,
        beside: KVPort,
        buffers: HotBuffers,
        transfer: HostTransfer,
        tag: Callable[[torch.Tensor, torch.Tensor], None] | None,
    ) -> None:
        self._beside = beside
        self._buffers = buffers
        self._transfer = transfer
        self._tag = tag

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        raise AssertionError(f"{slots.shape[0]} tokens whose KV is on the host are not gathered")

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:
        host_slots = self._buffers.host_slots[span.row, span.start : span.start + span.slots.shape[0]]
        self._transfer.land(values[0], host_slots)
        self._beside.scatter_rest(span, values[1:])
        if self._tag is not None:
            self._tag(host_slots, span.slots)
