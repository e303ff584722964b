"""Who knows of whose work: a vector clock per stream, and one for the host.

Component k of a clock is the number of the last launch of actor k that its owner comes after. Lists are
compared and joined by index; a clock copied before an actor existed is short and knows nothing of it.
"""

from __future__ import annotations

Clock = list[int]

HOST = 0


class Clocks:
    """Actor 0 is the host, actor k + 1 the stream with id k. Actors appear when they are first met."""

    def __init__(self) -> None:
        self._clocks: list[Clock] = [[0]]

    def of(self, actor: int) -> Clock:
        """The clock itself: what is learnt later shows in it."""
        clocks = self._clocks
        while len(clocks) <= actor:
            for clock in clocks:
                clock.append(0)
            clocks.append([0] * len(clocks[0]))
        return clocks[actor]

    def launch(self, actor: int) -> int:
        """The number of the stream's next launch, which comes after all that the host knows by now."""
        clock, host = self.of(actor), self._clocks[HOST]
        if clock[HOST] < host[HOST]:
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
        host = self._clocks[HOST]
        _join(host, known)
        host[HOST] += 1

    def synchronize_all(self) -> None:
        for actor in range(1, len(self._clocks)):
            self.synchronize([*self._clocks[actor]])

    def known(self) -> Clock:
        """What every later operation comes after: all streams have seen it, or the host has, which launches them."""
        host, *streams = self._clocks
        return [
            max(by_host, min((clock[k] for clock in streams), default=0)) for k, by_host in enumerate(host)
        ]


def _join(clock: Clock, other: Clock) -> None:
    for k, number in enumerate(other):
        if number > clock[k]:
            clock[k] = number
