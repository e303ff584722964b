"""An exchange between all ranks in virtual time: what arrives, when, and which rank waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.ranks.message_router import MessageRouter
from schedbench.profiles.ranks.rank_threads import Member, SharedSimulation, run_ranks
from schedbench.profiles.ranks.virtual_link import VirtualLink
from schedbench.profiles.run.machines import one_thread
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.gpu import open_vgpu, patched
from schedbench.sched.link import LinkError

T = TypeVar("T")
H200 = load("h200")
NVLINK = H200.links["nvlink"]
MS = 1_000_000  # ns


def world(ranks: int, body: Callable[[VirtualLink, VirtualGpu], T]) -> list[T]:
    router = MessageRouter([f"rank {rank}" for rank in range(ranks)])

    def rank(member: Member) -> T:
        device = SharedSimulation(gap=0, member=member)
        with open_vgpu(H200, values="real", simulation=device) as gpu:
            member.attach(device, lambda: gpu.runtime.now)
            return body(VirtualLink(member, gpu, router, NVLINK, patience=5 * MS), gpu)

    with one_thread(), patched(hazards=False):
        return run_ranks(ranks, rank)


def numbers(gpu: VirtualGpu, *values: int) -> torch.Tensor:
    return torch.tensor(values).to(gpu.device)


def test_every_rank_gets_its_parts() -> None:
    def body(link: VirtualLink, gpu: VirtualGpu) -> list[list[int]]:
        came = link.all_to_all("parts", [numbers(gpu, link.rank, to) for to in range(link.size)])
        return [part.tolist() for part in came]

    assert world(3, body) == [[[source, rank] for source in range(3)] for rank in range(3)]


def test_empty_parts_are_not_sent() -> None:
    def body(link: VirtualLink, gpu: VirtualGpu) -> tuple[list[torch.Size], bool]:
        own = torch.empty((2 * link.rank, 4), device=gpu.device)
        came = link.all_to_all("rows", [own] * link.size)
        return [part.shape for part in came], "link" in gpu.observer.streams.values()

    shapes = [(0, 4), (2, 4)]
    assert world(2, body) == [(shapes, False), (shapes, True)]


def test_hosts_wait_for_the_last_one() -> None:
    """The last rank to arrive continues at once."""

    def body(link: VirtualLink, gpu: VirtualGpu) -> int:
        part = numbers(gpu, link.rank)
        gpu.runtime.now += link.rank * MS
        before = gpu.runtime.now
        link.all_to_all("parts", [part] * 2)
        return gpu.runtime.now - before

    first, last = world(2, body)
    assert last < NVLINK.host_latency.value
    assert MS < first < MS + NVLINK.host_latency.value


def test_streams_continue_when_all_parts_have_arrived() -> None:
    size = 36_000_000  # bytes
    takes = size / NVLINK.bandwidth.value * 1e9

    def body(link: VirtualLink, gpu: VirtualGpu) -> int:
        part = torch.empty(size // 8 * (1 if link.rank else 2), dtype=torch.int64, device=gpu.device)
        before = gpu.runtime.now
        link.all_to_all("parts", [part] * 2)
        assert gpu.runtime.now - before < takes  # hosts do not wait for devices
        gpu.runtime.synchronize_device()
        return gpu.runtime.now - before

    sender, receiver = world(2, body)
    assert 2 * takes < sender < receiver < 2 * takes + 10 * NVLINK.latency.value
    assert receiver - sender <= NVLINK.latency.value + 10_000


def test_an_absent_rank_is_named() -> None:
    def body(link: VirtualLink, gpu: VirtualGpu) -> None:
        if link.rank == 0:
            link.all_to_all("parts", [numbers(gpu, 1)] * 2)

    with pytest.raises(LinkError, match=r"rank 0 waited 0\.005 s for 'parts' of rank 1"):
        world(2, body)
