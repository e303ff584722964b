"""Workers in processes of their own that take turns in virtual time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from schedbench.profiles.engines.failures import Answer
from schedbench.profiles.engines.rank_processes import RankError, run_ranks
from schedbench.profiles.engines.turns import TurnLink
from schedbench.profiles.platform.hardware import LinkProfile, load
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.sched.disagg.layout import RankLayout
from schedbench.sched.link import FOREVER, LinkError

PROFILE: LinkProfile = load("h200").links["nvlink"]
LAYOUTS = [RankLayout(rank, 1, 1) for rank in range(2)]
Run = Callable[[TurnLink], Answer]


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


def run_linked(run: Run) -> Sequence[Answer]:
    names = [place.name for place in LAYOUTS]
    return run_ranks(names, lambda rank, its: run(TurnLink(rank, 2, its)), failed, lambda: None)


def answers(run: Run) -> Sequence[Any]:
    return [answer["report"] for answer in run_linked(run)]


def raised(run: Run) -> str:
    before = children()
    with pytest.raises(RankError) as found:
        run_linked(run)
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
        (lambda: os._exit(3), "the process of decode 0 exited with 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process of decode 0 was ended by SIGKILL"),
        (
            lambda: os.closerange(3, 999) or time.sleep(1000),
            "the process of decode 0 has closed its connection",
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


def test_the_error_of_a_worker_names_it() -> None:
    def run(link: TurnLink) -> Answer:
        Clock(link)
        if link.rank:
            raise ValueError("no memory")
        link.receive(1, "never")
        raise AssertionError

    assert raised(run) == "decode 0: no memory"


def test_a_copy_of_a_worker_that_its_engine_forks_says_nothing() -> None:
    def run(link: TurnLink) -> Answer:
        Clock(link)
        if os.fork():
            assert os.wait()[1] == 0
        link.post(1 - link.rank, "kv", link.rank, 1)
        return {"report": link.receive(1 - link.rank, "kv").value}

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
