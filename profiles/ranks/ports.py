"""How a rank's tensors get to a link between processes, and from there onto its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ..vgpu import VirtualGpu
from ..vgpu.engine import EventRecording, PeerEventRecording
from ..vgpu.peer_copy import receive, send


class Stamp(NamedTuple):
    """Virtual instants of the sender's: when its host sent, and when the tensors had left; and what those who receive
    come after, where somebody keeps account of that."""

    sent: int
    left: int
    host_knows: Sequence[int] = ()
    known: Sequence[int] = ()  # of the tensors


class Ports(Protocol):
    def out(self, tensors: Sequence[torch.Tensor], name: str) -> tuple[Sequence[torch.Tensor], Stamp | None]:
        """Values that a carrier can take, after what the current stream has been given so far; a stamp where time is
        virtual."""

    def flush(self, name: str) -> None:
        """The current stream goes on once what was sent under that name has left."""

    def into(self, values: Sequence[torch.Tensor], stamp: Stamp | None) -> tuple[torch.Tensor, ...]:
        """Tensors of the device, for the current stream."""

    def seconds(self, ns: int) -> float:
        """How long one really waits while the host's clock goes on by that much."""


class VirtualPorts:
    """Of a virtual GPU, whose link takes no time: what the network needs is no part of what is emulated. Nothing
    arrives before it was sent."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._queue = gpu.runtime.simulation.queue()
        gpu.observer.streams[self._queue.id] = "link"
        self._leaving: dict[str, list[EventRecording]] = {}

    def out(self, tensors: Sequence[torch.Tensor], name: str) -> tuple[Sequence[torch.Tensor], Stamp]:
        runtime = self._gpu.runtime
        if not tensors:
            return (), Stamp(runtime.now, runtime.now, runtime.host_clock())
        values, mark = send(self._gpu, self._queue, tensors, 0, name=name)
        self._leaving.setdefault(name, []).append(mark)
        sent = runtime.now
        return values, Stamp(sent, runtime.simulation.wait(mark), runtime.host_clock(), mark.clock)

    def flush(self, name: str) -> None:
        for mark in self._leaving.pop(name, ()):
            self._gpu.runtime.wait_event(self._gpu.runtime.stream, mark)

    def into(self, values: Sequence[torch.Tensor], stamp: Stamp | None) -> tuple[torch.Tensor, ...]:
        assert stamp is not None
        runtime, left = self._gpu.runtime, EventRecording()
        runtime.now = max(runtime.now, stamp.sent)
        left.time, left.clock = stamp.left, stamp.known
        runtime.join_host_clock(stamp.host_knows)
        return receive(self._gpu, values, PeerEventRecording(left, 0) if values else None)

    def seconds(self, ns: int) -> float:  # noqa: ARG002
        return 0.0


class DevicePorts:
    """Of a real device, or of a host. Which way the tensors take from there is the carrier's choice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def out(self, tensors: Sequence[torch.Tensor], name: str) -> tuple[Sequence[torch.Tensor], None]:  # noqa: ARG002
        return tensors, None

    def flush(self, name: str) -> None:
        """What is sent was put together by the current stream: it leaves its tensors in stream order."""

    def into(self, values: Sequence[torch.Tensor], stamp: Stamp | None) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        return tuple(value.to(self._device) for value in values)

    def seconds(self, ns: int) -> float:
        return max(0, ns) / 1e9
