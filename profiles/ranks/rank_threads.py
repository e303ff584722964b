"""Ranks as threads of one process, of which one runs at a time: the one whose virtual time is lowest.

A rank keeps the baton until it waits, or makes a call of its link or clock while another rank's time is lower.
Order: (time, rank). The ranks' loops are ordinary code, and a run is the same every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..vgpu.engine import FOREVER, EventRecording, Simulation
from .joint import advance

T = TypeVar("T")
_GLANCE = 0.1  # seconds between two looks for Ctrl-C


class Awaited(Protocol):
    """What a rank stands still for."""

    def reached(self) -> int | None:
        """When it is there, ns; None while that is not known."""

    def marks(self) -> Sequence[EventRecording]:
        """Marks that would tell."""


class AwaitedMark:
    def __init__(self, mark: EventRecording) -> None:
        self._mark = mark

    def reached(self) -> int | None:
        return self._mark.time

    def marks(self) -> Sequence[EventRecording]:
        return (self._mark,)


class AwaitedInstant:
    def __init__(self, at: int) -> None:
        self._at = at

    def reached(self) -> int | None:
        return self._at

    def marks(self) -> Sequence[EventRecording]:
        return ()


class WorldStoppedError(Exception):
    """Another rank has failed: this one cannot go on."""


class Member:
    """One rank's place in the world: what time it is there, and what it waits for."""

    def __init__(self, baton: RankScheduler, rank: int) -> None:
        self.rank = rank
        self.over = False
        self.told = False  # of the world's end
        self._baton = baton
        self._turn = threading.Semaphore(0)
        self._clock: Callable[[], int] = lambda: 0
        self._awaited: Awaited | None = None
        self._deadline = FOREVER
        self.simulation: Simulation | None = None

    def attach(self, simulation: Simulation, clock: Callable[[], int]) -> None:
        """The rank has a device and a clock from now on."""
        self.simulation, self._clock = simulation, clock

    def give_way(self) -> None:
        """Let ranks whose time is lower go first."""
        self._baton.pass_on(self)

    def wait(self, awaited: Awaited, deadline: int = FOREVER) -> int:
        """Stand still until it is there, or until the deadline; the time then."""
        self._awaited, self._deadline = awaited, deadline
        try:
            self._baton.pass_on(self)
            return self.time
        finally:
            self._awaited = None

    def settle(self, now: int) -> None:
        """Bring all devices up to this rank's clock, which is the lowest once the others had their turns."""
        self._baton.pass_on(self)
        advance(self._baton.devices, now, ())

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
    def marks(self) -> Sequence[EventRecording]:
        return () if self._awaited is None else self._awaited.marks()

    def take_turn(self) -> None:
        self._turn.acquire()

    def be_next(self) -> None:
        self._turn.release()


class RankScheduler:
    def __init__(self, ranks: int) -> None:
        self.members = [Member(self, rank) for rank in range(ranks)]
        self._stop: type[BaseException] | None = None

    @property
    def devices(self) -> Sequence[Simulation]:
        return [member.simulation for member in self.members if member.simulation is not None]

    def stop(self, why: type[BaseException]) -> None:
        """Every rank that gets the baton from now on meets ``why``, once."""
        self._stop = self._stop or why

    def pass_on(self, member: Member) -> None:
        """To the rank whose time is lowest; returns when that is this one."""
        chosen = self._lowest()
        if chosen is not member:
            chosen.be_next()
            member.take_turn()
        self._meet(member)

    def start(self) -> None:
        self._lowest().be_next()

    def leave(self, member: Member) -> None:
        """The rank is over, for good or bad."""
        member.over = True
        if any(not other.over for other in self.members):
            self._lowest().be_next()

    def _lowest(self) -> Member:
        going = [member for member in self.members if not member.over]
        unknown = [mark for member in going if not member.known for mark in member.marks]
        if unknown:
            bound = min((member.time for member in going), default=FOREVER)
            advance(self.devices, bound, unknown)
        return min(going, key=lambda member: (member.time, member.rank))

    def _meet(self, member: Member) -> None:
        if self._stop is not None and not member.told:
            member.told = True
            raise self._stop


def run_ranks(ranks: int, body: Callable[[Member], T]) -> list[T]:
    """``body`` once per rank; the results by rank. Ctrl-C reaches every rank. Raises what the first one to fail raised,
    once all have stopped."""
    baton = RankScheduler(ranks)
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
            baton.stop(WorldStoppedError)
        finally:
            baton.leave(member)
            over[member.rank].set()

    over = [threading.Event() for _ in baton.members]
    for member in baton.members:
        threading.Thread(target=run, args=(member,), daemon=True).start()
    baton.start()
    _wait(over, baton)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(ranks)]


def _wait(over: Sequence[threading.Event], baton: RankScheduler) -> None:
    """Until all ranks are over. Not by ``Thread.join``: once it was interrupted it takes the thread for ended
    (bpo-45274)."""
    for event in over:
        while not event.is_set():
            try:
                event.wait(_GLANCE)
            except KeyboardInterrupt:
                baton.stop(KeyboardInterrupt)
