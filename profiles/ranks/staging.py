"""How a rank's tensors get off its device for a link between processes, and onto it from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..vgpu.copies import receive, send
from ..vgpu.device import VirtualGpu
from ..vgpu.engine import EventRecording, PeerEventRecording


class SendTimes(NamedTuple):
    """Virtual instants at the sender, ns: when its host sent, and when the tensors had left. ``host_known`` and
    ``known``: the vector clocks of the sender's host and of the tensors, where they are kept."""

    sent: int
    left: int
    host_known: Sequence[int] = ()
    known: Sequence[int] = ()


class TensorStaging:
    """For a real device, or for the host. The transport chooses how the bytes travel from there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def export(
        self,
        tensors: Sequence[torch.Tensor],
        name: str,  # noqa: ARG002
    ) -> tuple[Sequence[torch.Tensor], SendTimes | None]:
        """Values that a transport can take, after what the current stream has been given so far; with times where time
        is virtual."""
        return tensors, None

    def flush(self, name: str) -> None:
        """The current stream waits until what was exported under that name has left. Here it packs what is sent itself,
        in stream order."""

    def place(self, values: Sequence[torch.Tensor], times: SendTimes | None) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        """Tensors of the device, for the current stream."""
        return tuple(value.to(self._device) for value in values)

    def seconds(self, ns: int) -> float:
        """How long a rank really waits while its clock advances by ``ns``."""
        return max(0, ns) / 1e9


class VirtualStaging(TensorStaging):
    """For a virtual GPU. The link takes no time, as the network is not emulated; nothing arrives before it was sent."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._queue = gpu.runtime.simulation.queue()
        gpu.observer.streams[self._queue.id] = "link"
        self._leaving: dict[str, list[EventRecording]] = {}

    def export(self, tensors: Sequence[torch.Tensor], name: str) -> tuple[Sequence[torch.Tensor], SendTimes]:
        runtime = self._gpu.runtime
        if not tensors:
            return (), SendTimes(runtime.now, runtime.now, runtime.host_clock())
        values, mark = send(self._gpu, self._queue, tensors, 0, name=name)
        self._leaving.setdefault(name, []).append(mark)
        sent = runtime.now
        return values, SendTimes(sent, runtime.simulation.wait(mark), runtime.host_clock(), mark.clock)

    def flush(self, name: str) -> None:
        for mark in self._leaving.pop(name, ()):
            self._gpu.runtime.wait_event(self._gpu.runtime.stream, mark)

    def place(self, values: Sequence[torch.Tensor], times: SendTimes | None) -> tuple[torch.Tensor, ...]:
        assert times is not None
        runtime, left = self._gpu.runtime, EventRecording()
        runtime.now = max(runtime.now, times.sent)
        left.time, left.clock = times.left, times.known
        runtime.join_host_clock(times.host_known)
        return receive(self._gpu, values, PeerEventRecording(left, 0) if values else None)

    def seconds(self, ns: int) -> float:  # noqa: ARG002
        return 0.0
