"""Threads of ranks run in the order of (time, rank); a device is not simulated beyond events that could reach it."""

from __future__ import annotations

import random

import pytest

from schedbench.profiles.ranks.message_router import MessageInFlight, RankInbox
from schedbench.profiles.ranks.rank_threads import (
    Member,
    SharedSimulation,
    advance,
    awaited_instant,
    awaited_mark,
    run_ranks,
)
from schedbench.profiles.ranks.virtual_link import awaited_any
from schedbench.profiles.vgpu.engine import (
    COMPUTE,
    FOREVER,
    LINK,
    EventRecording,
    EventTime,
    PeerEventRecording,
    Simulation,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0


def attached(member: Member) -> Clock:
    clock = Clock()
    member.attach(SharedSimulation(gap=0, member=member), lambda: clock.now)
    return clock


def give_way(member: Member) -> None:
    """Lets ranks whose time is lower run first."""
    member.wait(awaited_instant(0))


def test_the_lowest_time_goes_first_and_ties_go_to_the_lowest_rank() -> None:
    order: list[tuple[int, int]] = []

    def rank(member: Member) -> None:
        clock = attached(member)
        give_way(member)
        for step in (3, 5, 5, 7) if member.rank else (5, 5, 10):
            order.append((clock.now, member.rank))
            clock.now += step
            give_way(member)

    run_ranks(3, rank)
    assert order == sorted(order)
    assert order[:3] == [(0, 0), (0, 1), (0, 2)]


def test_a_sleeping_rank_lets_the_others_run() -> None:
    seen: list[str] = []

    def rank(member: Member) -> None:
        clock = attached(member)
        if member.rank == 0:
            clock.now = member.wait(awaited_instant(100))
            seen.append("sleeper")
            return
        for _ in range(4):
            clock.now += 20
            give_way(member)
            seen.append(f"at {clock.now}")

    run_ranks(2, rank)
    assert seen == ["at 20", "at 40", "at 60", "at 80", "sleeper"]


def test_a_wait_without_an_event_ends_at_the_deadline() -> None:
    def rank(member: Member) -> int:
        attached(member)
        return member.wait(awaited_mark(EventRecording()), 50 + member.rank)

    assert run_ranks(2, rank) == [50, 51]


def test_the_first_failure_is_raised_and_stops_the_others() -> None:
    def rank(member: Member) -> None:
        clock = attached(member)
        while True:
            clock.now += 1
            if member.rank == 1 and clock.now == 5:
                raise ValueError("rank 1 has failed")
            give_way(member)

    with pytest.raises(ValueError, match="rank 1 has failed"):
        run_ranks(3, rank)


def test_a_host_waits_for_another_device() -> None:
    """Rank 1's stream is held until rank 0's transfer has arrived; its own later work runs after that."""
    marks: list[EventRecording] = []

    def rank(member: Member) -> int:
        clock = attached(member)
        device = member.simulation
        assert device is not None
        queue = device.queue()
        if member.rank == 0:
            device.submit(queue, COMPUTE, now=0, duration=100, row=("work",))
            device.submit(queue, LINK, now=0, duration=30, row=("send",))
            marks.append(device.record(queue, 0))
            give_way(member)
            return device.wait(marks[0])
        give_way(member)
        device.wait_event(queue, PeerEventRecording(marks[0], 7))
        device.submit(queue, COMPUTE, now=clock.now, duration=10, row=("after",))
        return device.wait(device.record(queue, clock.now))

    assert run_ranks(2, rank) == [130, 147]


@pytest.mark.parametrize("in_order", [False, True])
def test_a_rank_that_waits_for_its_own_device_goes_on_unless_ranks_run_in_order(*, in_order: bool) -> None:
    order: list[int] = []

    def rank(member: Member) -> None:
        clock = attached(member)
        device = member.simulation
        assert device is not None
        queue = device.queue()
        for _ in range(2):
            for _ in range(2):  # the first is simulated as it is launched
                device.submit(queue, COMPUTE, now=clock.now, duration=100, row=("work",))
            clock.now = device.wait(device.record(queue, clock.now))
            order.append(member.rank)

    run_ranks(2, rank, in_order=in_order)
    assert order == ([0, 1, 0, 1] if in_order else [0, 0, 1, 1])


def test_a_rank_wakes_at_the_first_message_although_a_later_one_is_known_before() -> None:
    inbox = RankInbox()

    def rank(member: Member) -> int:
        clock = attached(member)
        device = member.simulation
        assert device is not None
        if member.rank == 0:
            return member.wait(awaited_any(inbox, ("kv",), set()))
        at, landing = 500, None
        if member.rank == 2:
            queue, at = device.queue(), 0
            for number in range(2):
                device.submit(queue, LINK, now=0, duration=30, row=(f"send {number}",))
            landing = PeerEventRecording(device.record(queue, 0), 5)
        message = MessageInFlight(member.rank, 1, at, b"", (), landing, ())
        inbox.queue(member.rank, "kv").append(message)
        clock.now = 1000  # its host goes on without waiting for its device
        give_way(member)
        return clock.now

    assert run_ranks(3, rank) == [65, 1000, 1000]


@pytest.mark.parametrize("later_wait", [False, True])
def test_devices_are_not_simulated_in_turns_before_one_waits_for_another(
    monkeypatch: pytest.MonkeyPatch, *, later_wait: bool
) -> None:
    runs: list[int] = []
    simulate = Simulation.run

    def counted(
        device: Simulation, horizon: int, until: EventTime | None = None, *, alone: bool = False
    ) -> None:
        runs.append(horizon)
        simulate(device, horizon, until, alone=alone)

    monkeypatch.setattr(Simulation, "run", counted)

    def rank(member: Member) -> int:
        attached(member)
        device = member.simulation
        assert device is not None
        queues = [device.queue(), device.queue()]
        for number in range(100):  # by turns on both devices, and on two streams of each
            device.submit(queues[number % 2], COMPUTE, now=0, duration=10 + member.rank, row=(number,))
        if later_wait:
            device.wait_event(queues[0], PeerEventRecording(EventRecording(), 0))
        return device.wait(device.record(queues[1], 0))

    assert run_ranks(2, rank) == [1000, 1100]
    assert len(runs) < 10


def chained(seed: int, *, joint: bool) -> list[list[tuple[str, int, int]]]:
    """Random work on three devices with sends between them; all of it is launched before any runs. With ``joint`` the
    devices advance in steps of random length, else in one step."""
    dice = random.Random(seed)
    devices = [Simulation(gap=dice.choice([0, 3])) for _ in range(3)]
    queues = [[device.queue(), device.queue()] for device in devices]
    for number in range(60):
        place, lane = dice.randrange(3), dice.randrange(2)
        device, queue, now = devices[place], queues[place][lane], number * 2
        if dice.random() < 0.3:
            other = dice.randrange(3)
            device.submit(queue, LINK, now=now, duration=dice.randrange(1, 40), row=(f"send {number}",))
            mark = device.record(queue, now)
            devices[other].wait_event(queues[other][dice.randrange(2)], PeerEventRecording(mark, 5))
        else:
            device.submit(queue, COMPUTE, now=now, duration=dice.randrange(1, 25), row=(f"k {number}",))
    bound = 0
    while joint and bound < 3000:
        bound += dice.randrange(1, 60)
        advance(devices, bound, ())
    advance(devices, FOREVER, ())
    return [sorted((row[0], start, end) for row, start, end in device.served) for device in devices]


@pytest.mark.parametrize("seed", range(30))
def test_the_result_does_not_depend_on_the_length_of_steps(seed: int) -> None:
    assert chained(seed, joint=True) == chained(seed, joint=False)
