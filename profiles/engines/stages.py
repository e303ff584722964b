"""The stages of a pipeline, and the messages between them.

What an engine sends by ``torch.distributed`` from point to point takes the times of the hardware's link. A stage waits
for each message by its sender and its group, so that every run takes the same course.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import torch

from ...sched.link import LinkError, Message
from ..platform.hardware import LinkProfile
from ..run.rank_context import RankContext
from ..vgpu.copies import land, send
from ..vgpu.device import VirtualGpu
from ..vgpu.engine import EventRecording, PeerEventRecording
from ..vgpu.patching import attributes_set
from ..vgpu.tensor import DeviceTensor
from .failures import Answer
from .messages import HostTensor, end_copies_of
from .rank_processes import Failure, run_ranks

_HOST: Final = "host"
_DEVICE: Final = "device"


def run_stages(
    ranks: Sequence[RankContext],
    run: Callable[[RankContext, StageLink], Answer],
    failure: Failure,
    beat: Callable[[], None],
) -> list[Answer]:
    """The answers of ``run`` for all stages. See ``run_ranks``."""
    ends: list[dict[int, Connection]] = [{} for _ in ranks]
    for one, other in combinations(range(len(ranks)), 2):
        ends[one][other], ends[other][one] = Pipe()

    def linked(rank: int, _: Connection) -> Answer:
        _close_others(ends, rank)
        with StageLink.open(rank, ends[rank]) as link:
            return run(ranks[rank], link)

    return run_ranks(ranks, linked, failure, beat, forked=lambda: _close_others(ends, None))


def _close_others(ends: Sequence[Mapping[int, Connection]], own: int | None) -> None:
    """Close the ends of all ranks but this process' own, so that an end closes with the process of its rank."""
    for rank, connections in enumerate(ends):
        if rank != own:
            for connection in connections.values():
                connection.close()


class StageLink:
    """A stage's end of its connections, by the other stages' numbers. A stage that is gone raises LinkError."""

    def __init__(self, rank: int, ends: Mapping[int, Connection]) -> None:
        self.rank, self.size = rank, len(ends) + 1
        self._ends = ends
        self._process = os.getpid()
        self._arrived: defaultdict[tuple[int, str], deque[Any]] = defaultdict(deque)
        self._outgoing: dict[int, SimpleQueue[bytes | None]] = {peer: SimpleQueue() for peer in ends}
        self._threads = [
            threading.Thread(target=self._send_queued, args=(peer,), daemon=True) for peer in ends
        ]

    @classmethod
    @contextmanager
    def open(cls, rank: int, ends: Mapping[int, Connection]) -> Iterator[StageLink]:
        """What has been sent leaves before the block ends."""
        link = cls(rank, ends)
        for thread in link._threads:
            thread.start()
        try:
            yield link
        finally:
            for queue in link._outgoing.values():
                queue.put(None)
            for thread in link._threads:
                thread.join()

    def put(self, to: int, tag: str, value: Any) -> None:
        end_copies_of(self._process)
        self._outgoing[to].put(pickle.dumps((tag, value)))

    def take(self, source: int, tag: str) -> Any:
        """Wait for the next message of that tag. Raises LinkError."""
        end_copies_of(self._process)
        arrived = self._arrived[source, tag]
        while not arrived:
            try:
                found, value = pickle.loads(self._ends[source].recv_bytes())
            except (EOFError, OSError):
                raise LinkError(f"stage {self.rank} waited for stage {source}, which is gone") from None
            self._arrived[source, found].append(value)
        return arrived.popleft()

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        assert not tensors, "an engine sends its own tensors"
        self.put(to, tag, value)

    def receive(self, source: int, tag: str) -> Message:
        return Message(source, self.take(source, tag), ())

    def _send_queued(self, peer: int) -> None:
        with suppress(OSError):  # to a stage that is gone
            while (message := self._outgoing[peer].get()) is not None:
                self._ends[peer].send_bytes(message)
        self._ends[peer].close()


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


@contextmanager
def messages_answered(link: StageLink, gpu: VirtualGpu, profile: LinkProfile) -> Iterator[None]:
    """Answer point-to-point messages of ``torch.distributed`` by the link, with these times."""
    messages = _Messages(link, gpu, profile)
    functions = ((name, getattr(messages, name)) for name in ("isend", "irecv", "send", "recv"))
    with attributes_set((torch.distributed, name, function) for name, function in functions):
        yield


def _channel(kind: str, group: Any) -> str:
    """Messages of one group do not wait for those of another one."""
    return f"{kind} {getattr(group, 'group_name', '')}"


class _Messages:
    def __init__(self, link: StageLink, gpu: VirtualGpu, profile: LinkProfile) -> None:
        self._link, self._gpu, self._profile = link, gpu, profile
        self._queue = gpu.runtime.simulation.queue()
        gpu.observer.streams[self._queue.id] = "link"

    def isend(self, tensor: torch.Tensor, dst: int, group: Any = None, *_: Any, **__: Any) -> _Work:
        """The current stream waits in ``wait`` until a device's tensor has left."""
        runtime, profile = self._gpu.runtime, self._profile
        with torch._C.DisableTorchFunction():
            runtime.now += round(profile.call.value)
            if type(tensor) is not DeviceTensor:
                arrives = runtime.now + round(profile.host_latency.value)
                sent = _Sent(HostTensor.of(tensor), arrives, runtime.host_clock())
                self._link.put(dst, _channel(_HOST, group), sent)
                return _Work()
            duration = round(tensor.nbytes * 1e9 / profile.bandwidth.value)
            [value], left = send(self._gpu, self._queue, [tensor], duration, name="send")
            self._link.put(
                dst,
                _channel(_DEVICE, group),
                _Sent(HostTensor.of(value), runtime.simulation.wait(left), left.clock),
            )
            return _Work(lambda: runtime.wait_event(runtime.stream, left))

    def irecv(self, tensor: torch.Tensor, src: int, group: Any = None, *_: Any, **__: Any) -> _Work:
        """The host waits for a host's tensor, and the current stream for a device's."""
        runtime, device = self._gpu.runtime, type(tensor) is DeviceTensor
        sent: _Sent = self._link.take(src, _channel(_DEVICE if device else _HOST, group))
        with torch._C.DisableTorchFunction():
            if type(tensor) is DeviceTensor:
                left = EventRecording()
                left.time, left.clock = sent.at, sent.known
                runtime.wait_peer_event(PeerEventRecording(left, round(self._profile.latency.value)))
                land(self._gpu, tensor, sent.tensor.value())
            else:
                runtime.now = max(runtime.now, sent.at)
                runtime.join_host_clock(sent.known)
                tensor.copy_(sent.tensor.value())
        return _Work()

    def send(self, *args: Any, **kwargs: Any) -> None:
        self.isend(*args, **kwargs).wait()

    def recv(self, *args: Any, **kwargs: Any) -> None:
        self.irecv(*args, **kwargs).wait()
