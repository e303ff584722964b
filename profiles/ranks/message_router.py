"""Messages between ranks of one process: on their way, in inboxes, and under the scenario's script of failures."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...scenarios.failures import words
from ...scenarios.schema import Failure
from ..run.rank_context import FaultInjector
from ..vgpu.engine import PeerEventRecording


class MessageInFlight(NamedTuple):
    """A message on its way. The host's part arrives at ``at``, ns; the tensors at ``landing``. ``known``: the vector
    clock of the sender's host, where one is kept."""

    source: int
    serial: int
    at: int
    payload: bytes
    values: Sequence[torch.Tensor]
    landing: PeerEventRecording | None
    known: Sequence[int]

    @property
    def whole_at(self) -> int | None:
        """When all of it is there, as far as that is known."""
        if self.landing is None:
            return self.at
        landed = self.landing.time
        return None if landed is None else max(self.at, landed)


class Departure(NamedTuple):
    """A rank's end, which other ranks learn of at ``at``, ns. ``root``: what it was caused by first, where the rank's
    work was not done."""

    at: int
    why: str
    root: str


@dataclass(slots=True)
class RankInbox:
    """Messages to one rank, by sender and tag, in the order in which they arrive."""

    messages: dict[tuple[int, str], deque[MessageInFlight]] = field(default_factory=dict)
    departures: dict[int, Departure] = field(default_factory=dict)  # of ranks that send no more

    def queue(self, source: int, tag: str) -> deque[MessageInFlight]:
        return self.messages.setdefault((source, tag), deque())

    def silent_from(self, rank: int) -> int:
        """When nothing more can come from a rank that has departed: not before its late messages, of which all that is
        sent has been simulated, since a rank's device is idle when the rank ends."""
        at = self.departures[rank].at
        for (source, _), messages in self.messages.items():
            for message in messages if source == rank else ():
                assert message.whole_at is not None, (
                    "a rank departs when what it has sent has landed or is dropped"
                )
                at = max(at, message.whole_at)
        return at

    def heads(self, tags: Sequence[str]) -> list[tuple[MessageInFlight, str]]:
        return [
            (messages[0], tag) for (_, tag), messages in self.messages.items() if messages and tag in tags
        ]

    def head(self, source: int, tag: str) -> MessageInFlight | None:
        messages = self.messages.get((source, tag))
        return messages[0] if messages else None


class MessageRouter:
    """Carries messages between all ranks, which have ``names``. Drops, delays, stalls, reorders and repeats them by the
    ``script``, once their sender's injector is armed."""

    def __init__(self, names: Sequence[str], script: Sequence[Failure] = ()) -> None:
        self.names = names
        self.inboxes = [RankInbox() for _ in names]
        self._script = script
        self._failures = [(index, failure) for index, failure in enumerate(script) if failure.link]
        self._triggered: set[int] = set()  # indices into the script
        self.injectors: dict[int, FaultInjector] = {}  # of every sender, where the script has failures
        self._sent: Counter[tuple[int, int, str]] = Counter()
        self._late: set[tuple[int, int]] = set()  # source and serial of messages that others may overtake
        self._stall_ends: dict[int, int] = {}  # by index into the script, ns

    def put(self, to: int, tag: str, message: MessageInFlight) -> None:
        arriving = self._faulted(to, tag, message) if self._failures else [message]
        if to not in self.inboxes[message.source].departures:
            queue = self.inboxes[to].queue(message.source, tag)
            for each in arriving:
                queue.append(each)
                self._overtake(queue)

    def depart(self, rank: int, departure: Departure) -> None:
        """Announce a rank's end to all ranks; the first announcement counts."""
        for inbox in self.inboxes:
            inbox.departures.setdefault(rank, departure)

    def drop(self, rank: int, now: int) -> None:
        """Drop the tensors that a rank has sent and that have not arrived, with their messages; messages of its host
        alone have left already. All devices have been simulated up to ``now``."""
        for inbox in self.inboxes:
            for (source, _), messages in inbox.messages.items():
                if source == rank:
                    kept = [
                        message
                        for message in messages
                        if message.landing is None
                        or (message.whole_at is not None and message.whole_at <= now)
                    ]
                    messages.clear()
                    messages.extend(kept)

    @property
    def missed(self) -> tuple[str, ...]:
        """Entries of the script that the run did not come to, in words."""
        triggered = self._triggered.union(*(injector.triggered for injector in self.injectors.values()))
        return tuple(words(failure) for index, failure in enumerate(self._script) if index not in triggered)

    def _faulted(self, to: int, tag: str, message: MessageInFlight) -> Sequence[MessageInFlight]:
        """What arrives in place of the message."""
        if not self.injectors[message.source].armed:
            return [message]
        ends, messages = [self.names[message.source], self.names[to]], [message]
        self._sent[message.source, to, tag] += 1
        number = self._sent[message.source, to, tag]
        for index, failure in self._failures:
            if [*failure.link] == ends and failure.tag == tag and number >= failure.nth:
                messages = [x for each in messages for x in self._apply(index, failure, each, number)]
        return messages

    def _apply(
        self, index: int, failure: Failure, message: MessageInFlight, number: int
    ) -> Sequence[MessageInFlight]:
        """What arrives in place of the message by one entry of the script; ``number`` is at least its nth."""
        if number == failure.nth:
            self._triggered.add(index)
        elif failure.does != "stall":
            return [message]
        ns = round((failure.ms or 0) * 1e6)
        if failure.does == "drop" or (failure.does == "stall" and not ns):
            return []
        if failure.does == "repeat":
            return [message, message]
        if failure.does == "stall":
            end = self._stall_ends.setdefault(index, message.at + ns)
            return [_delayed(message, max(0, end - message.at))]
        if failure.does == "reorder":
            self._late.add((message.source, message.serial))
        return [_delayed(message, ns)]

    def _overtake(self, queue: deque[MessageInFlight]) -> None:
        """Move the last message of the queue before those that it may overtake and that arrive later."""
        message, place = queue[-1], len(queue) - 1
        while (
            place > 0
            and (message.source, queue[place - 1].serial) in self._late
            and queue[place - 1].at > message.at
        ):
            place -= 1
        if place < len(queue) - 1:
            queue.insert(place, queue.pop())


def _delayed(message: MessageInFlight, ns: int) -> MessageInFlight:
    landing = None if message.landing is None else message.landing.delayed(ns)
    return message._replace(at=message.at + ns, landing=landing)
