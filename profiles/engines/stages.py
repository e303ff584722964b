"""The stages of a pipeline, and the messages between them.

What an engine sends by ``torch.distributed`` from point to point takes the times of the hardware's link. A stage waits
for each message by its sender and its group, so that every run takes the same course.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from ...sched.link import FOREVER, LinkError, Message
from ..platform.hardware import LinkProfile
from ..vgpu.copies import land, send
from ..vgpu.device import VirtualGpu
from ..vgpu.engine import EventRecording, PeerEventRecording
from ..vgpu.patching import attributes_set
from ..vgpu.tensor import DeviceTensor
from .messages import HostTensor
from .rank_processes import Receipt
from .turns import TurnLink

_HOST: Final = "host"
_DEVICE: Final = "device"


class _Sent(NamedTuple):
    """A tensor's values. ``at``: ns, when a host's tensor arrives, or when a device's has left. ``known``: the vector
    clock of the sender then, where one is kept."""

    tensor: HostTensor
    at: int
    known: Sequence[int]


class _Work:
    """What torch returns for a message."""

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait

    def wait(self, *_: Any) -> bool:
        self._wait()
        return True


def _channel(kind: str, group: Any) -> str:
    """Messages of one group do not wait for those of another one."""
    return f"{kind} {getattr(group, 'group_name', '')}"


class StageLink(TurnLink):
    """A stage's end of its connection to the others. Messages take no time: tensors bring their own times with them. A
    stage that is gone raises LinkError."""

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        assert not tensors, "an engine sends its own tensors"
        self.post(to, tag, value, 0)

    def receive(self, source: int, tag: str) -> Message:
        """Raises LinkError."""
        while not self._arrived[source, tag]:
            if self._wait(Receipt(source)) >= FOREVER:
                raise LinkError(f"stage {self.rank} waited for stage {source}, which is gone")
        return super().receive(source, tag)

    @contextmanager
    def opened(self, gpu: VirtualGpu, profile: LinkProfile) -> Iterator[None]:
        """Answer point-to-point messages of ``torch.distributed``, with these times."""
        self._queue = gpu.runtime.simulation.queue()
        gpu.observer.streams[self._queue.id] = "link"
        answered = {
            "isend": self._isend,
            "irecv": self._irecv,
            "send": lambda *args, **kwargs: self._isend(*args, **kwargs).wait(),
            "recv": lambda *args, **kwargs: self._irecv(*args, **kwargs).wait(),
        }
        with (
            super().opened(gpu, profile),
            attributes_set((torch.distributed, *one) for one in answered.items()),
        ):
            yield

    def _isend(self, tensor: torch.Tensor, dst: int, group: Any = None, *_: Any, **__: Any) -> _Work:
        """The current stream waits in ``wait`` until a device's tensor has left."""
        runtime, profile = self._gpu.runtime, self.profile
        with torch._C.DisableTorchFunction():
            runtime.now += round(profile.call.value)
            if type(tensor) is not DeviceTensor:
                arrives = runtime.now + round(profile.host_latency.value)
                sent = _Sent(HostTensor.of(tensor), arrives, runtime.host_clock())
                self.send(dst, _channel(_HOST, group), sent)
                return _Work()
            duration = round(tensor.nbytes * 1e9 / profile.bandwidth.value)
            [value], left = send(self._gpu, self._queue, [tensor], duration, name="send")
            self.send(
                dst,
                _channel(_DEVICE, group),
                _Sent(HostTensor.of(value), runtime.simulation.wait(left), left.clock),
            )
            return _Work(lambda: runtime.wait_event(runtime.stream, left))

    def _irecv(self, tensor: torch.Tensor, src: int, group: Any = None, *_: Any, **__: Any) -> _Work:
        """The host waits for a host's tensor, and the current stream for a device's."""
        runtime, device = self._gpu.runtime, type(tensor) is DeviceTensor
        sent: _Sent = self.receive(src, _channel(_DEVICE if device else _HOST, group)).value
        with torch._C.DisableTorchFunction():
            if type(tensor) is DeviceTensor:
                left = EventRecording()
                left.time, left.clock = sent.at, sent.known
                runtime.wait_peer_event(PeerEventRecording(left, round(self.profile.latency.value)))
                land(self._gpu, tensor, sent.tensor.value())
            else:
                runtime.now = max(runtime.now, sent.at)
                runtime.join_host_clock(sent.known)
                tensor.copy_(sent.tensor.value())
        return _Work()
