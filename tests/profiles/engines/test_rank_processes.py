"""Ranks in processes of their own: workers that take turns in virtual time, and stages of a pipeline with the messages
that an engine sends between them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from schedbench.profiles.engines.failures import Answer
from schedbench.profiles.engines.rank_processes import RankError, run_ranks
from schedbench.profiles.engines.stages import StageLink
from schedbench.profiles.engines.turns import TurnLink
from schedbench.profiles.platform.hardware import LinkProfile, load
from schedbench.profiles.programs.torch_cuda import cuda_answered
from schedbench.profiles.vgpu.device import CURRENT, VirtualGpu
from schedbench.profiles.vgpu.engine import QUEUES, Simulation
from schedbench.profiles.vgpu.gpu import open_vgpu, patched
from schedbench.sched.link import FOREVER, LinkError

PROFILE: LinkProfile = load("h200").links["nvlink"]
LATER = 5_000_000  # ns
Run = Callable[[Any], Answer]
distributed: Any = torch.distributed


class Clock:
    """A virtual GPU's host clock."""

    def __init__(self, link: TurnLink) -> None:
        self.now = 0
        link.opened(cast(VirtualGpu, SimpleNamespace(runtime=self)), PROFILE).__enter__()


def failed(error: BaseException) -> Answer:
    return {"failed": str(error), "traceback": ""}


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    return {child.pid for child in psutil.Process().children()}


def run_linked(run: Run, link: type[TurnLink], ranks: int) -> Sequence[Answer]:
    names = [f"rank {rank}" for rank in range(ranks)]
    return run_ranks(names, lambda rank, its: run(link(rank, ranks, its)), failed, lambda: None)


def answers(run: Run, link: type[TurnLink] = TurnLink) -> Sequence[Any]:
    return [answer["report"] for answer in run_linked(run, link, 2)]


def raised(run: Run, link: type[TurnLink] = TurnLink, ranks: int = 2) -> str:
    before = children()
    with pytest.raises(RankError) as found:
        run_linked(run, link, ranks)
    assert children() == before  # none is left, alive or as a zombie
    message = found.value.of_rank["failed"]
    assert isinstance(message, str)
    return message


def test_a_worker_receives_what_was_sent_before_its_time_and_nothing_later() -> None:
    """The worker that looks is the faster one in real time."""

    def run(link: TurnLink) -> Answer:
        clock = Clock(link)
        if link.rank == 0:
            time.sleep(0.2)
            for at in (100, 200, 300):
                clock.now = at
                link.take_turn()
                link.post(1, "kv", at, at + 50)
            return {"report": None}
        seen = []
        for at in (149, 150, 300, 350):
            clock.now = at
            link.take_turn()
            message = link.poll("kv")
            seen.append(None if message is None else message.value)
        return {"report": seen}

    assert answers(run)[1] == [None, 100, 200, 300]


def test_a_worker_sleeps_until_a_message_arrives_by_the_times_of_the_link() -> None:
    def run(link: TurnLink) -> Answer:
        clock = Clock(link)
        if link.rank == 0:
            clock.now = 1000
            link.send(1, "pages", [1, 2])
            return {"report": clock.now}
        link.sleep_until(FOREVER)
        message = link.poll("pages")
        assert message is not None
        assert (message.source, message.value) == (0, [1, 2])
        clock.now += 5
        link.sleep_until(clock.now + 7)
        return {"report": clock.now}

    sent = 1000 + round(PROFILE.call.value)
    assert answers(run) == [sent, sent + round(PROFILE.host_latency.value) + 12]


def test_a_wait_for_what_cannot_come_ends_where_all_workers_wait() -> None:
    def run(link: TurnLink) -> Answer:
        Clock(link)
        with pytest.raises(LinkError, match="all workers wait"):
            link.receive(1 - link.rank, "never")
        return {"report": link.rank}

    assert answers(run) == [0, 1]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda: os._exit(3), "the process of rank 1 exited with 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process of rank 1 was ended by SIGKILL"),
        (
            lambda: os.closerange(3, 999) or time.sleep(1000),
            "the process of rank 1 has closed its connection",
        ),
    ],
    ids=["exits", "killed", "closes everything"],
)
def test_a_worker_that_ends_is_named_and_the_other_is_ended(how: Callable[[], object], says: str) -> None:
    def run(link: TurnLink) -> Answer:
        clock = Clock(link)
        if link.rank:
            how()
        while True:
            clock.now += 1
            link.take_turn()

    assert raised(run) == says


def test_a_copy_of_a_worker_that_its_engine_forks_says_nothing() -> None:
    def run(link: TurnLink) -> Answer:
        Clock(link)
        if os.fork():
            assert os.wait()[1] == 0
        link.post(1 - link.rank, "kv", link.rank, 1)
        value = link.receive(1 - link.rank, "kv").value
        assert link.poll("kv") is None
        return {"report": value}

    assert answers(run) == [1, 0]


def test_an_interrupt_reaches_every_worker() -> None:
    parent = os.getpid()

    def run(link: TurnLink) -> Answer:
        clock = Clock(link)
        try:
            while True:
                clock.now += 1
                link.take_turn()
                if (link.rank, clock.now) == (0, 100):  # the other one has taken turns, too
                    os.kill(parent, signal.SIGINT)
        except KeyboardInterrupt:
            return {"report": "interrupted"}

    assert answers(run) == ["interrupted"] * 2


def exchange(link: StageLink) -> Answer:
    """The first stage sends a host's and a device's tensor late, and gets their sum."""
    hardware, simulation = load("h200"), Simulation(gap=0, first=link.rank * QUEUES)
    with patched(hazards=False), open_vgpu(hardware, simulation=simulation):
        gpu = CURRENT.get()
        with cuda_answered(gpu, hardware), link.opened(gpu, PROFILE):
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
    total, (on_host, on_device) = answers(exchange, StageLink)
    assert total == [2.5, 3.5, 4.5]
    assert on_host == round(LATER + PROFILE.call.value + PROFILE.host_latency.value)
    assert on_device > LATER + 2 * PROFILE.call.value + PROFILE.latency.value


def test_a_rank_that_misses_another_is_not_the_reason() -> None:
    def run(link: TurnLink) -> Answer:
        Clock(link)
        try:
            return {"report": link.receive(1 - link.rank, "never").value}
        except LinkError:
            if link.rank == 0:
                raise
            raise ValueError("no memory") from None

    assert raised(run) == "rank 1: no memory"


@pytest.mark.parametrize("failing", [0, 2])
def test_the_reason_of_a_stage_that_fails_is_reported(failing: int) -> None:
    """Every stage waits for the next one, and the last one for the first."""

    def run(link: StageLink) -> Answer:
        if link.rank == failing:
            raise ValueError("no memory")
        return {"report": link.receive((link.rank + 1) % 3, "never").value}

    assert raised(run, StageLink, ranks=3) == f"rank {failing}: no memory"


def test_a_stage_does_not_wait_for_one_that_has_ended() -> None:
    def run(link: StageLink) -> Answer:
        if link.rank == 0:
            with pytest.raises(LinkError, match="stage 0 waited for stage 1, which is gone"):
                link.receive(1, "never")
        return {"report": link.rank}

    assert answers(run, StageLink) == [0, 1]
