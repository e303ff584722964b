"""Which waits, events and record_streams a run needs: without one of them, two of its accesses would have no order.

A place is a source line that orders. For each place the clocks are also kept as they would be without it, until two
accesses to the same bytes show that the place is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Final

from ...record.result import OrderingRow, SitePart
from ...record.timeline import OrderKind, Site
from ..sites import Sites
from .clocks import Clock, VectorClocks, join
from .footprints import Footprint
from .shadow import IssuedOp, ShadowMemory

# After so many executions the clocks without a place start again from the real ones. Without a limit, the accesses that
# have to be kept for a place that no access needs would grow with the run.
_RENEWED_AFTER: Final = 4


class RecordedClock(list[int]):
    """The clock of a recording. ``without`` has the clock that it would have without a place."""

    without: Mapping[int, Clock] = {}


@dataclass(slots=True)
class _Place:
    """``executed``: how often the source line has ordered accesses."""

    kind: OrderKind
    executed: int = 0
    is_needed: bool = False


class ProbedClocks(VectorClocks):
    """The clocks of the program, and those of the same program without each place of which no need is known.

    The latter are kept by actor and place. An actor makes the same launches in all these programs, so that its own
    component is only kept in its clock of the program.
    """

    def __init__(self, host: int, sites: Sites) -> None:
        self._sites = sites
        self._numbers: dict[int | None, int] = {}
        self._places: dict[int, _Place] = {}
        self._without: dict[int, dict[int, Clock]] = {}
        self._floors: dict[int, Clock] = {}
        super().__init__(host)

    # ---- places ----------------------------------------------------------------------------------------------

    def reach(self, kind: OrderKind, line: int | None = None) -> int:
        """The calling source line orders. Returns its number, which is looked up by that of the device's call there."""
        number = self._numbers.get(line)
        if line is None or number is None:
            number = self._numbers[line] = self._sites.here()
        place = self._places.get(number)
        if place is None:
            place = self._places[number] = _Place(kind)
        if kind == "wait":  # wait_stream also records an event
            place.kind = kind
        if not place.is_needed and place.executed % _RENEWED_AFTER == 0:
            for actor, clock in self._clocks.items():
                self._without[actor][number] = clock.copy()
            self._floors.clear()
        place.executed += 1
        return number

    def places(self) -> tuple[OrderingRow, ...]:
        """In the order of the source. A line with several calls is needed if one of them is."""
        sites, needed = self._sites.resolved(), dict[tuple[OrderKind, Site], bool]()
        for number, place in self._places.items():
            if number >= 0:
                key = place.kind, sites[number]
                needed[key] = place.is_needed or needed.get(key, False)
        return tuple(
            OrderingRow(kind=kind, site=SitePart(**site._asdict()), needed=needed[kind, site])
            for kind, site in sorted(needed, key=lambda key: (key[1].file, key[1].line))
        )

    def compare(self, shadow: ShadowMemory, launch: IssuedOp, footprint: Footprint, *, write: bool) -> None:
        """Find the places without which an earlier access would race with this one."""
        without = self._without[launch.actor]
        if not without:
            return
        for earlier in shadow.depending(launch, self.floor(launch.actor), footprint, write=write):
            actor, seq = earlier.launch.actor, earlier.launch.seq
            for number, clock in list(without.items()):
                races = seq > (clock[actor] if actor < len(clock) else 0)
                if races if earlier.kept_by is None else earlier.kept_by == number:
                    self._places[number].is_needed = True
                    for clocks in self._without.values():
                        del clocks[number]
                    self._floors.clear()

    # ---- clocks ----------------------------------------------------------------------------------------------

    def floor(self, actor: int) -> Clock:
        """What the actor comes after without any one of the places; its own launches may be missing."""
        floor = self._floors.get(actor)
        if floor is None:
            clock = self.of(actor)
            columns = zip_longest(clock, *self._without[actor].values(), fillvalue=0)
            floor = self._floors[actor] = [min(numbers) for numbers in islice(columns, len(clock))]
        return floor

    def _added(self, actor: int) -> Clock:
        clock = super()._added(actor)
        self._without[actor] = {number: [0] * len(clock) for number in self._without.get(self.host, ())}
        self._floors.clear()
        return clock

    def _join_host(self, actor: int) -> None:
        super()._join_host(actor)
        self._floors.pop(actor, None)
        of_host = self._without[self.host]
        for number, clock in self._without[actor].items():
            join(clock, of_host[number])

    def recorded(self, actor: int, place: int | None = None) -> Clock:
        clock = RecordedClock(self.of(actor))
        clock.without = {
            number: [] if number == place else [*without[:actor], clock[actor], *without[actor + 1 :]]
            for number, without in self._without[actor].items()
        }
        return clock

    def wait(self, actor: int, known: Sequence[int], place: int | None = None) -> None:
        super().wait(actor, known)
        self._join_without(actor, known, place)

    def synchronize(self, known: Sequence[int], place: int | None = None) -> None:
        super().synchronize(known)
        self._join_without(self.host, known, place)

    def _join_without(self, actor: int, known: Sequence[int], place: int | None) -> None:
        self._floors.pop(actor, None)
        for number, clock in self._without[actor].items():
            if number != place:
                join(clock, _without(known, number))


def _without(known: Sequence[int], place: int) -> Sequence[int]:
    """The clock of a recording as it would be without the place; of one made before the place, the same."""
    return known.without.get(place, known) if isinstance(known, RecordedClock) else known
