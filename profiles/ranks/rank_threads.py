"""Ranks as threads of one process, of which one runs at a time: the rank whose virtual time is lowest.

A rank keeps running until it waits for something that another rank can change, or until it calls its link or clock
while another rank's time is lower. Ranks are ordered by (time, rank), so that every run of the same ranks takes the
same course.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple, TypeVar

from ..vgpu.engine import FOREVER, QUEUES, EventRecording, EventTime, Simulation

T = TypeVar("T")
_POLL_S = 0.1  # seconds between two looks for Ctrl-C


class Awaited(NamedTuple):
    """Something that a rank waits for. ``reached``: when it is there, ns, None while that is not known. ``marks``:
    those whose times would make it known, or known to be earlier; ``by_mark``: only the time of its one mark does."""

    reached: Callable[[], int | None]
    marks: Callable[[], Sequence[EventRecording]] = tuple
    by_mark: bool = False


def awaited_mark(mark: EventRecording) -> Awaited:
    return Awaited(lambda: mark.time, lambda: (mark,), by_mark=True)


def awaited_instant(at: int) -> Awaited:
    return Awaited(lambda: at)


class WorldStoppedError(Exception):
    """Another rank has failed: this one cannot go on."""


class Member:
    """One rank of the world: its thread's turn, its time, and what it waits for."""

    def __init__(self, scheduler: RankScheduler, rank: int) -> None:
        self.rank = rank
        self.over = False
        self.stopped = False  # has raised what the world was stopped with
        self._scheduler = scheduler
        self._turn = threading.Lock()  # held except while the turn is granted
        self._turn.acquire()
        self._clock: Callable[[], int] = lambda: 0
        self._awaited: Awaited | None = None
        self._deadline = FOREVER
        self.in_order = scheduler.in_order
        self.simulation: Simulation | None = None

    def attach(self, simulation: Simulation, clock: Callable[[], int]) -> None:
        """Give the rank its device and its clock."""
        self.simulation, self._clock = simulation, clock

    def wait(self, awaited: Awaited, deadline: int = FOREVER) -> int:
        """Wait until it is there, or until the deadline; return the time then."""
        self._awaited, self._deadline = awaited, deadline
        try:
            self._scheduler.switch_from(self)
            return self.time
        finally:
            self._awaited = None

    def settle(self, now: int) -> None:
        """Bring all devices up to this rank's clock, which is the lowest once ranks with lower times have run."""
        self._scheduler.switch_from(self)
        advance(self._scheduler.devices, now, ())

    @property
    def known(self) -> bool:
        return self._awaited is None or self._awaited.reached() is not None

    @property
    def time(self) -> int:
        """When the rank goes on, as far as that is known."""
        now = self._clock()
        if self._awaited is None:
            return now
        reached = self._awaited.reached()
        return max(now, min(self._deadline, FOREVER if reached is None else reached))

    @property
    def unknown_marks(self) -> Sequence[EventRecording]:
        """Marks that are not simulated yet; each may let the rank go on sooner."""
        return [mark for mark in (self._awaited.marks() if self._awaited else ()) if mark.time is None]

    def run_ahead(self) -> bool:
        """Simulate the rank's device as far as no other rank can change it: until the host goes on, or a stream waits
        for another device. Returns whether anything was simulated."""
        simulation = self.simulation
        if simulation is None:
            return False
        head = simulation.head()
        if head.start is None or head.waits:
            return False
        if unknown := self.unknown_marks:
            if self._awaited is None or not self._awaited.by_mark or self._deadline != FOREVER:
                return False
            simulation.run(FOREVER, unknown[0], alone=True)
            return True
        if not self.known or head.start > self.time:
            return False
        simulation.run(self.time, alone=True)
        return True

    def take_turn(self) -> None:
        self._turn.acquire()

    def grant_turn(self) -> None:
        self._turn.release()


class SharedSimulation(Simulation):
    """The simulation of one rank's device. It is advanced only together with those of the other ranks, and no further
    than the lowest host clock."""

    def __init__(self, *, gap: int, member: Member) -> None:
        super().__init__(gap=gap, first=member.rank * QUEUES)
        self._member = member

    def settle(self, now: int) -> None:
        self._member.settle(now)

    def wait(self, mark: EventRecording) -> int:
        if mark.time is None and not self._member.in_order:
            self.run(FOREVER, mark, alone=True)
        if mark.time is None:
            self._member.wait(awaited_mark(mark))
        assert mark.time is not None, "what is waited for has been launched"
        return mark.time

    def drain(self) -> int:
        for mark in [self.record(queue, 0) for queue in self._queues]:
            self.wait(mark)
        return max((queue.tail for queue in self._queues), default=0)


class RankScheduler:
    """``in_order``: a rank lets ranks with lower times run at every wait. Without it, a rank goes on where it waits for
    what only its own device and messages that were sent already determine."""

    def __init__(self, ranks: int, *, in_order: bool) -> None:
        self.in_order = in_order
        self.members = [Member(self, rank) for rank in range(ranks)]
        self._stop: type[BaseException] | None = None

    @property
    def devices(self) -> Sequence[Simulation]:
        return [member.simulation for member in self.members if member.simulation is not None]

    def stop(self, why: type[BaseException]) -> None:
        """Every rank that runs from now on raises ``why``, once."""
        self._stop = self._stop or why

    def switch_from(self, member: Member) -> None:
        """Run the rank whose time is lowest; returns when that is ``member``."""
        chosen = self._lowest()
        if chosen is not member:
            chosen.grant_turn()
            member.take_turn()
        if self._stop is not None and not member.stopped:
            member.stopped = True
            raise self._stop

    def start(self) -> None:
        self._lowest().grant_turn()

    def leave(self, member: Member) -> None:
        """The rank has ended or failed."""
        member.over = True
        if any(not other.over for other in self.members):
            self._lowest().grant_turn()

    def _lowest(self) -> Member:
        running = [member for member in self.members if not member.over]
        if not all(member.known for member in running):
            idle = 0
            for member in cycle(running):  # a device that ran may have released others
                idle = 0 if member.run_ahead() else idle + 1
                if idle == len(running):
                    break
        while unknown := [mark for member in running for mark in member.unknown_marks]:
            bound = min(member.time for member in running)
            advance(self.devices, bound, unknown)
            if all(mark.time is None for mark in unknown):
                break  # all of them lie beyond the lowest time
        return min(running, key=lambda member: (member.time, member.rank))


class _AnyKnown:
    """Known as soon as one of the marks is."""

    def __init__(self, marks: Sequence[EventTime]) -> None:
        self._marks = marks

    @property
    def time(self) -> int | None:
        return next((mark.time for mark in self._marks if mark.time is not None), None)


def advance(devices: Sequence[Simulation], bound: int, awaited: Sequence[EventRecording]) -> None:
    """Simulate what starts no later than ``bound``, or than the first of the ``awaited`` marks, on all devices.

    A device runs as far as the next event of any other device, or until it releases another one: nothing that it waits
    for can happen sooner. Only then is the next event of a device that did not run determined again.

        device 0   --x-----------x----      runs to the x of device 1,
        device 1   ------x------------      which may release device 0 or not
    """
    unknown, heads = list(awaited), [device.head() for device in devices]
    while True:
        bound = min([bound, *(mark.time for mark in unknown if mark.time is not None)])
        unknown = [mark for mark in unknown if mark.time is None]
        starts = [FOREVER if head.start is None else head.start for head in heads]
        first = min(starts, default=FOREVER)
        if first > bound or first == FOREVER:
            return
        place = starts.index(first)
        starts[place] = FOREVER
        held = [mark for head in heads for mark in head.waits]
        devices[place].run(min(bound, *starts), _AnyKnown([*unknown, *held]))
        if any(mark.time is not None for mark in held):
            heads = [device.head() for device in devices]
        else:
            heads[place] = devices[place].head()


def run_ranks(ranks: int, body: Callable[[Member], T], *, in_order: bool = False) -> list[T]:
    """Run ``body`` once per rank; return the results by rank. Ctrl-C reaches every rank. Raises what the first rank to
    fail raised, once all have stopped. ``in_order`` is needed where a rank can take back what it has sent."""
    scheduler = RankScheduler(ranks, in_order=in_order)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(member: Member) -> None:
        member.take_turn()
        try:
            results[member.rank] = body(member)
        except WorldStoppedError:
            pass
        except BaseException as error:
            failures.append(error)
            scheduler.stop(WorldStoppedError)
        finally:
            scheduler.leave(member)
            over[member.rank].set()

    over = [threading.Event() for _ in scheduler.members]
    for member in scheduler.members:
        threading.Thread(target=run, args=(member,), daemon=True).start()
    scheduler.start()
    _wait(over, scheduler)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(ranks)]


def _wait(over: Sequence[threading.Event], scheduler: RankScheduler) -> None:
    """Wait until all ranks are over. ``Thread.join`` cannot be used: once interrupted, it takes the thread for ended
    (bpo-45274)."""
    for event in over:
        while not event.is_set():
            try:
                event.wait(_POLL_S)
            except KeyboardInterrupt:
                scheduler.stop(KeyboardInterrupt)
