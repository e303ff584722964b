"""Copies of device memory to and from other devices.

The values are read when they are sent, in program order. An adversary delays no work beyond the link.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .bindings import clone
from .device import VirtualGpu
from .engine import EventRecording, PeerEventRecording, StreamQueue
from .factories import new
from .tensor import DeviceTensor


def send(
    gpu: VirtualGpu, queue: StreamQueue, tensors: Sequence[torch.Tensor], duration: int, *, name: str
) -> tuple[list[torch.Tensor], EventRecording]:
    """Send device tensors on a link's queue. Returns their values and the recording of when the last one has left."""
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
    """The values in memory of this device; the current stream waits for their arrival."""
    if arrival is not None:
        gpu.runtime.wait_peer_event(arrival)
    return tuple(_placed(gpu, value) for value in values)


def _placed(gpu: VirtualGpu, value: torch.Tensor) -> DeviceTensor:
    tensor = new(gpu, value.shape, value.stride(), value.dtype)
    gpu.executor.upload(tensor.held, value, pinned=False, waits=False)
    gpu.watcher.generated("receive", tensor)
    return tensor
