"""How the bytes of a message's tensors get from one process to another: with the message itself, or from GPU to GPU by
NCCL, without the host's memory between them."""

from __future__ import annotations

import hashlib
import socket
from collections import deque
from collections.abc import Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .torchrun import local_rank

NO_BYTES = torch.empty(0, dtype=torch.uint8)


class IncomingTensors(NamedTuple):
    """The bytes of a message's tensors, still on their way where there is ``work`` of torch.distributed's."""

    body: torch.Tensor
    work: Any = None

    def arrived(self) -> bool:
        """Whether all of them are there."""
        return self.work is None or bool(self.work.is_completed())

    def wait(self) -> torch.Tensor:
        """The bytes; the current stream waits for them."""
        if self.work is not None:
            self.work.wait()  # with NCCL the current stream waits, and not the host
            if self.body.is_cuda:
                self.body.record_stream(torch.cuda.current_stream())
        return self.body


class TensorTransport:
    """Tensors travel with the message that names them, through the host's memory; other transports override that.

    ``body``: bytes of the host's or of a device's memory, written by what the current stream was given so far.
    ``ticket_type``: of what ``offer`` returns, for ``codec.reader``.
    """

    ticket_type: Any = None

    def offer(self, to: int, body: torch.Tensor) -> tuple[Any, torch.Tensor]:  # noqa: ARG002
        """A ticket by which the receiver takes the body, and the bytes that travel with the message itself."""
        return None, body.cpu()

    def push(self, to: int, body: torch.Tensor) -> None:
        """Send what does not travel with the message. Called after the message was queued."""

    def take(self, source: int, ticket: Any, inline: torch.Tensor) -> IncomingTensors:  # noqa: ARG002
        """Take what was offered. Called in the order in which one peer offered. Raises RuntimeError."""
        return IncomingTensors(inline)

    def close(self) -> None:
        """Return once what was pushed has left."""


class DirectTransport(TensorTransport):
    """From device to device between ``ranks``, which the backend can join; between all others by messages.

    There is one process group for each direction: a communicator works in the order of its calls, so that in a common
    group two ranks that send before they receive would wait for each other. A communicator is made at its first use,
    once both ends have called it; the receiver does so when the message arrives. The constructor is collective: every
    rank of the default group must call it.
    """

    ticket_type: Any = int | None

    def __init__(self, device: torch.device, ranks: Sequence[int], backend: str) -> None:
        self._device = device
        self._rank = dist.get_rank()
        self._groups = {pair: dist.new_group(pair, backend=backend) for pair in permutations(ranks, 2)}
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def offer(self, to: int, body: torch.Tensor) -> tuple[int | None, torch.Tensor]:
        return (body.numel(), NO_BYTES) if self._is_joined(to, body) else (None, body.cpu())

    def push(self, to: int, body: torch.Tensor) -> None:
        if not self._is_joined(to, body):
            return
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        work = dist.isend(body, to, group=self._groups[self._rank, to])
        self._leaving.append((work, body))

    def take(self, source: int, ticket: int | None, inline: torch.Tensor) -> IncomingTensors:
        if ticket is None:
            return IncomingTensors(inline)
        body = torch.empty(ticket, dtype=torch.uint8, device=self._device)
        return IncomingTensors(body, dist.irecv(body, source, group=self._groups[source, self._rank]))

    def close(self) -> None:
        for work, _ in self._leaving:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _is_joined(self, to: int, body: torch.Tensor) -> bool:
        return (self._rank, to) in self._groups and body.device == self._device and bool(body.numel())


def joinable(gpus: Sequence[str | None]) -> tuple[int, ...]:
    """The ranks that NCCL can join, by the GPU of each rank: none where two share a GPU, which NCCL refuses."""
    used = [gpu for gpu in gpus if gpu is not None]
    if len(used) < 2 or len(set(used)) < len(used):
        return ()
    return tuple(rank for rank, gpu in enumerate(gpus) if gpu is not None)


def gpu_of(rank: int, gpus: int) -> int:
    """Which of a machine's GPUs is the rank's."""
    return local_rank(rank) % gpus


def take_gpu() -> None:  # cuda-only
    """Give this process the GPU of its rank: the ranks of one machine take its GPUs in turn."""
    torch.cuda.set_device(gpu_of(dist.get_rank(), torch.cuda.device_count()))


def nccl_transport(device: torch.device | None) -> TensorTransport:  # cuda-only
    """By NCCL where no two ranks share a GPU, otherwise by messages. ``device`` is this rank's, None for a rank without
    one. Collective: every rank calls it."""
    gpus = gathered_digests(None if device is None else _identity(device))
    ranks = joinable(gpus)
    if not ranks:
        return TensorTransport()
    return DirectTransport(device or torch.device("cpu"), ranks, "nccl")


def gathered_digests(identity: str | None) -> list[str | None]:
    """A digest of every rank's ``identity``, None for a rank without one. Collective: every rank calls it."""
    own = bytes(32) if identity is None else hashlib.sha256(identity.encode()).digest()
    digests = [torch.empty(32, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, torch.frombuffer(bytearray(own), dtype=torch.uint8))
    return [digest.numpy().tobytes().hex() if digest.any() else None for digest in digests]


def _identity(device: torch.device) -> str:  # cuda-only
    """The GPU's name, the same in every process."""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
