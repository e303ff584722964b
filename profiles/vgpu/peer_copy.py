"""Device memory that leaves for another device, and that comes from one.

What is sent is read when it is handed over, in program order: under an adversary, too, whose own lateness ends at the
link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .bindings import clone
from .engine import EventRecording, PeerEventRecording, StreamQueue
from .factories import new
from .tensor import DeviceTensor

if TYPE_CHECKING:
    from .gpu import VirtualGpu


def send(
    gpu: VirtualGpu, queue: StreamQueue, tensors: Sequence[torch.Tensor], duration: int, *, name: str
) -> tuple[list[torch.Tensor], EventRecording]:
    """Send tensors of the device on a link's queue: their values, and when they have left."""
    runtime = gpu.runtime
    runtime.order_after_current(queue)
    values, size = [], 0
    for tensor in tensors:
        assert isinstance(tensor, DeviceTensor)
        held = tensor.held
        values.append(held if held.is_meta else gpu.executor.read(clone, (held,), {}))
        size += tensor.nbytes
        before, runtime.stream = runtime.stream, queue
        try:
            gpu.watcher.sent(tensor)
        finally:
            runtime.stream = before
    return values, runtime.send(queue, duration, size=size, name=name)


def receive(
    gpu: VirtualGpu, values: Sequence[torch.Tensor], arrival: PeerEventRecording | None
) -> tuple[torch.Tensor, ...]:
    """The values in memory of this device; the current stream goes on when they have landed."""
    if arrival is not None:
        gpu.runtime.wait_peer_event(arrival)
    return tuple(_placed(gpu, value) for value in values)


def _placed(gpu: VirtualGpu, value: torch.Tensor) -> DeviceTensor:
    tensor = new(gpu, value.shape, value.stride(), value.dtype)
    gpu.executor.upload(tensor.held, value, pinned=False, waits=False)
    gpu.watcher.generated("receive", tensor)
    return tensor
