"""Vector clocks of the host and of every stream.

Component k of an actor's clock is the number of actor k's last launch that the actor's next operation comes after.
Clocks are compared and joined by index; one that was copied before an actor existed lacks the actor's component, which
counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest

Clock = list[int]

HOST = 0


class VectorClocks:
    """Actor ``host`` is the host, actor k + 1 the stream with id k. A clock is created when an actor is first used.

    Devices that exchange data number their hosts and streams differently; a clock's components for another device's
    actors are those that were sent with the data.
    """

    def __init__(self, host: int = HOST) -> None:
        self.host = host
        self._clocks: dict[int, Clock] = {}
        self.of(host)

    def of(self, actor: int) -> Clock:
        """The actor's clock itself, not a copy."""
        clock = self._clocks.get(actor)
        return self._added(actor) if clock is None else clock

    def _added(self, actor: int) -> Clock:
        clocks = self._clocks
        clocks[actor] = []
        width = max(actor + 1, *map(len, clocks.values()))
        for clock in clocks.values():
            clock += [0] * (width - len(clock))
        return clocks[actor]

    def launch(self, actor: int) -> int:
        """The number of the stream's next launch, which comes after everything that the host has waited for."""
        at, clock = self.host, self._clocks.get(actor) or self._added(actor)
        if clock[at] < self._clocks[at][at]:
            self._join_host(actor)
        number = clock[actor] = clock[actor] + 1
        return number

    def _join_host(self, actor: int) -> None:
        join(self._clocks[actor], self._clocks[self.host])

    def floor(self, actor: int) -> Clock:
        """What the actor certainly comes after; its clock, unless orders are probed."""
        return self.of(actor)

    def recorded(self, actor: int) -> Clock:
        """The clock of an event that is recorded on the stream now."""
        return self.of(actor).copy()

    def wait(self, actor: int, known: Sequence[int]) -> None:
        """The stream's next launches come after ``known``."""
        join(self.of(actor), known)

    def synchronize(self, known: Sequence[int]) -> None:
        """The host has waited for ``known``. A stream's clock joins the host's at the stream's next launch."""
        host = self._clocks[self.host]
        join(host, known)
        host[self.host] += 1

    def synchronize_all(self) -> None:
        for actor in [actor for actor in self._clocks if actor != self.host]:
            self.synchronize([*self._clocks[actor]])

    def known(self) -> Clock:
        """The clock that every later operation comes after: the host's, or what all streams' clocks have in common.
        Where orders are probed, a part of it."""
        floors = {actor: self.floor(actor) for actor in self._clocks}
        for actor, floor in floors.items():
            floor[actor] = self._clocks[actor][actor]
        host = floors.pop(self.host)
        columns = islice(zip_longest(host, *floors.values(), fillvalue=0), len(host))
        return [max(of_host, min(of_streams, default=0)) for of_host, *of_streams in columns]


def join(clock: Clock, other: Sequence[int]) -> None:
    """The clock comes after ``other``, too."""
    clock += [0] * (len(other) - len(clock))
    for k, number in enumerate(other):
        if number > clock[k]:
            clock[k] = number
