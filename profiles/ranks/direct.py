"""Tensors from device to device by torch.distributed, without the host's memory between them: NCCL, between GPUs."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from itertools import permutations
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from .carriers import ByMessage, Carrier, There

_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


class Direct:
    """Between ``ranks``, those with a device that the backend can join; all others by messages.

    One process group for each direction. What one communicator is given, it does in that order: two ranks that send
    before they receive would wait for each other. A communicator is made at its first use, when both ends have come:
    the receiver does as soon as it is told. Making one, every rank of the default group must call.
    """

    def __init__(self, device: torch.device, ranks: Sequence[int], backend: str) -> None:
        self._device = device
        self._rank = dist.get_rank()
        self._ways = {way: dist.new_group(way, backend=backend) for way in permutations(ranks, 2)}
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def give(self, to: int, body: torch.Tensor) -> tuple[int | None, torch.Tensor]:
        return (body.numel(), _NOTHING) if self._is_joined(to, body) else (None, body.cpu())

    def push(self, to: int, body: torch.Tensor) -> None:
        if not self._is_joined(to, body):
            return
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        work = dist.isend(body, to, group=self._ways[self._rank, to])
        self._leaving.append((work, body))

    def take(self, source: int, told: int | None, along: torch.Tensor) -> There | UnderWay:
        if told is None:
            return There(along)
        body = torch.empty(told, dtype=torch.uint8, device=self._device)
        return UnderWay(dist.irecv(body, source, group=self._ways[source, self._rank]), body)

    def close(self) -> None:
        for work, _ in self._leaving:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _is_joined(self, to: int, body: torch.Tensor) -> bool:
        return (self._rank, to) in self._ways and body.device == self._device and bool(body.numel())


class UnderWay(NamedTuple):
    work: Any
    body: torch.Tensor

    def landed(self) -> bool:
        return bool(self.work.is_completed())

    def opened(self) -> torch.Tensor:
        self.work.wait()  # NCCL's makes the current stream wait, and not the host
        if self.body.is_cuda:
            self.body.record_stream(torch.cuda.current_stream())
        return self.body


def joined(gpus: Sequence[str | None]) -> tuple[int, ...]:
    """Ranks that NCCL can join, of the GPU that each has: none where two share one, which it refuses."""
    held = [gpu for gpu in gpus if gpu is not None]
    if len(held) < 2 or len(set(held)) < len(held):
        return ()
    return tuple(rank for rank, gpu in enumerate(gpus) if gpu is not None)


def place_of(rank: int, gpus: int) -> int:
    """Which of a machine's GPUs is the rank's. torchrun says which of the machine's ranks it is."""
    return int(os.environ.get("LOCAL_RANK", rank)) % gpus


def take_a_gpu() -> None:  # cuda-only
    """Ranks of one machine have its GPUs in turn."""
    torch.cuda.set_device(place_of(dist.get_rank(), torch.cuda.device_count()))


def between_devices(own: torch.device | None) -> Carrier:  # cuda-only
    """By NCCL where no two ranks share a GPU, otherwise by messages. ``own`` is this rank's, None if it has no work for
    any. Every rank calls it."""
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if own is None else _name(own))
    ranks = joined(told)
    return Direct(own or torch.device("cpu"), ranks, "nccl") if ranks else ByMessage()


def _name(device: torch.device) -> str:  # cuda-only
    """The same whichever process asks."""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
