"""Who knows of whose work: a vector clock per stream, and one for the host.

Component k of a clock is the number of the last launch of actor k that its owner comes after. Lists are
compared and joined by index; a clock copied before an actor existed is short and knows nothing of it.
"""

from __future__ import annotations

Clock = list[int]

HOST = 0


class Clocks:
    """Actor ``host`` is the host, actor k + 1 the stream with id k. Actors appear when they are first met.

    Devices that exchange data have hosts and streams of different numbers; of another device's actors a clock has what
    came along with its data.
    """

    def __init__(self, host: int = HOST) -> None:
        self.host = host
        self._clocks: dict[int, Clock] = {}
        self.of(host)

    def of(self, actor: int) -> Clock:
        """The clock itself: what is learnt later shows in it."""
        clocks = self._clocks
        if actor not in clocks:
            clocks[actor] = []
            width = max(actor + 1, *map(len, clocks.values()))
            for clock in clocks.values():
                clock += [0] * (width - len(clock))
        return clocks[actor]

    def launch(self, actor: int) -> int:
        """The number of the stream's next launch, which comes after all that the host knows by now."""
        at, clock, host = self.host, self.of(actor), self._clocks[self.host]
        if clock[at] < host[at]:
            _join(clock, host)
        clock[actor] += 1
        return clock[actor]

    def recorded(self, actor: int) -> Clock:
        """What an event recorded on the stream now stands for."""
        return self.of(actor).copy()

    def wait(self, actor: int, known: Clock) -> None:
        """The stream's next launches come after ``known``."""
        _join(self.of(actor), known)

    def synchronize(self, known: Clock) -> None:
        """The host has waited for ``known``. Streams hear of it when the host launches something on them."""
        host = self._clocks[self.host]
        _join(host, known)
        host[self.host] += 1

    def synchronize_all(self) -> None:
        for actor in [actor for actor in self._clocks if actor != self.host]:
            self.synchronize([*self._clocks[actor]])

    def known(self) -> Clock:
        """What every later operation comes after: all streams have seen it, or the host has, which launches them."""
        host = self._clocks[self.host]
        streams = [clock for actor, clock in self._clocks.items() if actor != self.host]
        return [
            max(by_host, min((clock[k] if k < len(clock) else 0 for clock in streams), default=0))
            for k, by_host in enumerate(host)
        ]


def _join(clock: Clock, other: Clock) -> None:
    clock += [0] * (len(other) - len(clock))
    for k, number in enumerate(other):
        if number > clock[k]:
            clock[k] = number
