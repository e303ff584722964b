"""Stages of a pipeline in processes, and the messages that an engine sends between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from schedbench.profiles.engines.rank_processes import RankError, run_ranks
from schedbench.profiles.engines.stages import StageLink
from schedbench.profiles.platform.hardware import load
from schedbench.profiles.programs.torch_cuda import cuda_answered
from schedbench.profiles.vgpu.device import CURRENT
from schedbench.profiles.vgpu.engine import QUEUES, Simulation
from schedbench.profiles.vgpu.gpu import open_vgpu, patched
from schedbench.sched.link import LinkError

Run = Callable[[StageLink], dict[str, Any]]
LATER = 5_000_000  # ns
LINK = load("h200").links["nvlink"]
distributed: Any = torch.distributed


def failed(error: BaseException) -> dict[str, Any]:
    return {"failed": str(error)}


def run_linked(run: Run, stages: int = 2) -> Sequence[dict[str, Any]]:
    names = [f"stage {index}" for index in range(stages)]
    return run_ranks(names, lambda rank, its: run(StageLink(rank, stages, its)), failed, lambda: None)


def exchange(link: StageLink) -> dict[str, Any]:
    """The first stage sends a host's and a device's tensor late, and gets their sum."""
    hardware, simulation = load("h200"), Simulation(gap=0, first=link.rank * QUEUES)
    with patched(hazards=False), open_vgpu(hardware, simulation=simulation):
        gpu = CURRENT.get()
        with cuda_answered(gpu, hardware), link.opened(gpu, LINK):
            if link.rank == 0:
                gpu.clock.sleep_until(LATER)
                works = [
                    distributed.isend(torch.arange(3), 1, tag=0),
                    distributed.isend(torch.full((3,), 2.5, dtype=torch.bfloat16, device="cuda"), 1),
                ]
                found = torch.empty(3, device="cuda")
                distributed.irecv(found, src=1).wait()
                assert all(work.wait() for work in works)
                return {"report": found.tolist()}
            host, device = (
                torch.empty(3, dtype=torch.long),
                torch.empty(3, dtype=torch.bfloat16, device="cuda"),
            )
            distributed.recv(host, 0)
            at = gpu.runtime.now
            distributed.recv(device, 0)
            torch.cuda.synchronize()
            arrived = gpu.runtime.now
            distributed.send(device.float() + host.cuda(), 0)
            torch.cuda.synchronize()
            return {"report": (at, arrived)}


def test_tensors_arrive_with_their_values_after_the_latency_of_the_link() -> None:
    first, second = run_linked(exchange)
    assert first["report"] == [2.5, 3.5, 4.5]
    on_host, on_device = second["report"]
    assert on_host == round(LATER + LINK.call.value + LINK.host_latency.value)
    assert on_device > LATER + 2 * LINK.call.value + LINK.latency.value


def test_a_copy_of_a_stage_that_its_engine_forks_says_nothing() -> None:
    def run(link: StageLink) -> dict[str, Any]:
        if link.rank and os.fork():
            assert os.wait()[1] == 0
        link.send(1 - link.rank, "tag", link.rank)
        return {"report": link.receive(1 - link.rank, "tag").value}

    assert [answer["report"] for answer in run_linked(run)] == [1, 0]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_reason_of_a_stage_that_fails_is_reported(rank: int) -> None:
    """Every stage waits for the next one, and the last one for the first."""

    def run(link: StageLink) -> dict[str, Any]:
        if link.rank == rank:
            raise ValueError("no memory")
        return {"report": link.receive((link.rank + 1) % 3, "never").value}

    with pytest.raises(RankError) as raised:
        run_linked(run, stages=3)
    assert raised.value.of_rank == {"failed": f"stage {rank}: no memory"}


def test_a_stage_that_ends_without_a_report_is_named() -> None:
    def run(link: StageLink) -> dict[str, Any]:
        if link.rank:
            os._exit(0)
        with pytest.raises(LinkError, match="stage 0 waited for stage 1, which is gone"):
            link.receive(1, "never")
        return {"report": None}

    with pytest.raises(RankError) as raised:
        run_linked(run)
    assert raised.value.of_rank["failed"] == "the process of stage 1 exited with 0"
