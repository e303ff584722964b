"""Links that fail by script: messages that are lost, held up, late, or come twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...scenarios.failure_schema import Failure
from ...scenarios.failures import rank_names, words
from ...scenarios.schema import Scenario
from ...sched.link import Link
from ..record.result import Result
from ..run.fault_injector import FaultInjector
from .virtual import MessageInFlight, Post, VirtualLink


class FailingPost(Post):
    """Carries messages as the script says, from when their sender is armed."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(rank_names(scenario))
        self._scenario = scenario
        self._failures = [(place, failure) for place, failure in enumerate(scenario.faults) if failure.link]
        self._came: set[int] = set()  # places in the script
        self._perils: dict[int, FaultInjector] = {}
        self._sent: Counter[tuple[int, int, str]] = Counter()
        self._late: set[tuple[int, int]] = set()  # source and serial of parcels that others may pass
        self._ready: dict[int, int] = {}  # place of a stall to when it is over, ns

    def with_faults(self, link: VirtualLink) -> tuple[Link, FaultInjector | None]:
        """A rank's link, and what is to happen to the rank; nothing without a script."""
        if not self._scenario.faults:
            return link, None
        fault_injector = self._perils[link.rank] = FaultInjector(self._scenario, link.rank, link.die)
        return fault_injector.around(link), fault_injector

    def put(self, to: int, tag: str, parcel: MessageInFlight) -> None:
        for each in self._passed(to, tag, parcel) if self._failures else [parcel]:
            super().put(to, tag, each)
            self._overtake(to, tag, each)

    def told(self, result: Result) -> Result:
        """The same result, which says what of the script it did not come to."""
        came = self._came.union(*(fault_injector.came for fault_injector in self._perils.values()))
        script = enumerate(self._scenario.faults)
        missed = tuple(words(failure) for place, failure in script if place not in came)
        return result.model_copy(update={"run": result.run.model_copy(update={"missed": missed})})

    def _passed(self, to: int, tag: str, parcel: MessageInFlight) -> Sequence[MessageInFlight]:
        """What arrives in place of what was sent."""
        if not self._perils[parcel.source].armed:
            return [parcel]
        ends, parcels = [self.names[parcel.source], self.names[to]], [parcel]
        self._sent[parcel.source, to, tag] += 1
        number = self._sent[parcel.source, to, tag]
        for place, failure in self._failures:
            if [*failure.link] == ends and failure.tag == tag and number >= failure.nth:
                parcels = [x for each in parcels for x in self._befallen(place, failure, each, number)]
        return parcels

    def _befallen(
        self, place: int, failure: Failure, parcel: MessageInFlight, number: int
    ) -> Sequence[MessageInFlight]:
        """The same of one entry of the script; ``number`` is at least its nth."""
        if number == failure.nth:
            self._came.add(place)
        elif failure.does != "stall":
            return [parcel]
        ns = round((failure.ms or 0) * 1e6)
        if failure.does == "drop" or (failure.does == "stall" and not ns):
            return []
        if failure.does == "repeat":
            return [parcel, parcel]
        if failure.does == "stall":
            over = self._ready.setdefault(place, parcel.at + ns)
            return [_later(parcel, max(0, over - parcel.at))]
        if failure.does == "reorder":
            self._late.add((parcel.source, parcel.serial))
        return [_later(parcel, ns)]

    def _overtake(self, to: int, tag: str, parcel: MessageInFlight) -> None:
        """Past those before it that may be passed and would be later."""
        line = self.inboxes[to].line(parcel.source, tag)
        place = len(line) - 1
        while (
            place > 0
            and (parcel.source, line[place - 1].serial) in self._late
            and line[place - 1].at > parcel.at
        ):
            place -= 1
        if place < len(line) - 1:
            line.insert(place, line.pop())


def _later(parcel: MessageInFlight, ns: int) -> MessageInFlight:
    landing = None if parcel.landing is None else parcel.landing.delayed(ns)
    return parcel._replace(at=parcel.at + ns, landing=landing)
