"""Links between ranks of one process, in virtual time.

A message of the host's arrives a latency after it was sent. Tensors leave by a queue of their own, at the link's
bandwidth, and land a latency later; a send is buffered: it does not wait for the receiver.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from ...sched.link import LinkError, Message
from ..hardware import LinkProfile
from ..vgpu import VirtualGpu
from ..vgpu.carriage import depart, land
from ..vgpu.engine import Landing, Mark, Queue
from .baton import AwaitedInstant, Member

_LOOK: Final = 60 * 10**9  # ns between two looks at nothing at all


class Parcel(NamedTuple):
    """A message under way. The host's part arrives at ``at``, ns; the tensors when they have landed."""

    source: int
    serial: int
    at: int
    payload: bytes
    values: Sequence[torch.Tensor]
    landing: Landing | None
    known: Sequence[int]  # what the sender's host came after

    @property
    def whole_at(self) -> int | None:
        """When all of it is there, as far as that is known."""
        if self.landing is None:
            return self.at
        landed = self.landing.time
        return None if landed is None else max(self.at, landed)


@dataclass(slots=True)
class Inbox:
    """Messages to one rank, by sender and tag, in the order in which they were sent."""

    parcels: dict[tuple[int, str], deque[Parcel]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)  # ranks that are gone

    def put(self, tag: str, parcel: Parcel) -> None:
        self.parcels.setdefault((parcel.source, tag), deque()).append(parcel)

    def heads(self, tags: Sequence[str]) -> list[tuple[Parcel, str]]:
        return [(parcels[0], tag) for (_, tag), parcels in self.parcels.items() if parcels and tag in tags]

    def head(self, source: int, tag: str) -> Parcel | None:
        parcels = self.parcels.get((source, tag))
        return parcels[0] if parcels else None

    def take(self, source: int, tag: str) -> Parcel:
        return self.parcels[source, tag].popleft()


class _AwaitedHead:
    """The next message of one sender: its host's part."""

    def __init__(self, inbox: Inbox, source: int, tag: str) -> None:
        self._inbox = inbox
        self._place = source, tag

    def reached(self) -> int | None:
        parcel = self._inbox.head(*self._place)
        return None if parcel is None else parcel.at

    def marks(self) -> Sequence[Mark]:
        return ()


class _AwaitedAny:
    """The next whole message of anybody."""

    def __init__(self, inbox: Inbox, tags: Sequence[str]) -> None:
        self._inbox = inbox
        self._tags = tags

    def reached(self) -> int | None:
        known = [at for parcel, _ in self._inbox.heads(self._tags) if (at := parcel.whole_at) is not None]
        return min(known, default=None)

    def marks(self) -> Sequence[Mark]:
        landings = [parcel.landing for parcel, _ in self._inbox.heads(self._tags)]
        return [landing.mark for landing in landings if landing is not None and landing.time is None]


class VirtualLink:
    """``inboxes`` are shared by all ranks; ``patience`` is how long one waits for a message, ns."""

    def __init__(
        self,
        member: Member,
        gpu: VirtualGpu,
        inboxes: Sequence[Inbox],
        profile: LinkProfile,
        *,
        patience: int,
    ) -> None:
        self.rank, self.size = member.rank, len(inboxes)
        self._member = member
        self._gpu = gpu
        self._inboxes = inboxes
        self._inbox = inboxes[member.rank]
        self._profile = profile
        self._patience = patience
        self._queue: Queue | None = None
        self._leaving: dict[str, list[tuple[Mark, Sequence[torch.Tensor]]]] = {}
        self._serial = 0

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        runtime, profile = self._gpu.runtime, self._profile
        payload = pickle.dumps(value)
        values: Sequence[torch.Tensor] = ()
        landing = None
        if tensors:
            size = sum(tensor.nbytes for tensor in tensors)
            duration = round(size * 1e9 / profile.bandwidth.value)
            values, mark = depart(self._gpu, self._egress(), tensors, duration, name=f"send {tag}")
            self._leaving.setdefault(tag, []).append((mark, tensors))
            landing = Landing(mark, round(profile.latency.value))
        runtime.now += round(profile.call.value)
        self._serial += 1
        at = runtime.now + round(profile.host_latency.value)
        parcel = Parcel(self.rank, self._serial, at, payload, values, landing, runtime.host_knows())
        self._inboxes[to].put(tag, parcel)

    def flush(self, tag: str) -> None:
        for mark, _ in self._leaving.pop(tag, ()):
            self._gpu.runtime.hold(self._gpu.runtime.stream, mark)

    def receive(self, source: int, tag: str) -> Message:
        runtime = self._gpu.runtime
        parcel = self._inbox.head(source, tag)
        if parcel is None or parcel.at > runtime.now:
            deadline = runtime.now + self._patience
            reached = self._member.wait(_AwaitedHead(self._inbox, source, tag), deadline)
            parcel = self._inbox.head(source, tag)
            if parcel is None or parcel.at > reached:
                raise LinkError(
                    f"rank {self.rank} waited {self._patience / 1e9:g} s for '{tag}' of rank {source}"
                )
            runtime.stand(reached, f"receive {tag}", runtime.stream)
        return self._open(source, tag)

    def poll(self, tag: str) -> Message | None:
        runtime = self._gpu.runtime
        self._member.settle(runtime.now)
        arrived = [
            (at, parcel.source)
            for parcel, _ in self._inbox.heads((tag,))
            if (at := parcel.whole_at) is not None and at <= runtime.now
        ]
        return self._open(min(arrived)[1], tag) if arrived else None

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        runtime = self._gpu.runtime
        deadline = runtime.now + self._patience if until is None else min(until, runtime.now + _LOOK)
        awaited = _AwaitedAny(self._inbox, tags)
        reached = self._member.wait(awaited, deadline)
        there = awaited.reached()
        if until is None and (there is None or there > reached):
            raise LinkError(
                f"rank {self.rank} waited {self._patience / 1e9:g} s for any of {', '.join(sorted(tags))}"
            )
        runtime.now = max(runtime.now, reached)

    def _open(self, source: int, tag: str) -> Message:
        parcel = self._inbox.take(source, tag)
        self._gpu.runtime.hear(parcel.known)
        return Message(source, pickle.loads(parcel.payload), land(self._gpu, parcel.values, parcel.landing))

    def _egress(self) -> Queue:
        """Made when something is first sent."""
        if self._queue is None:
            self._queue = self._gpu.runtime.simulation.queue()
            self._gpu.observer.streams[self._queue.id] = "link"
        return self._queue


class WorldClock:
    """A rank's host clock; a sleep lets the others go on."""

    def __init__(self, gpu: VirtualGpu, member: Member) -> None:
        self._runtime = gpu.runtime
        self._member = member

    def now(self) -> int:
        return self._runtime.now

    def sleep_until(self, at: int) -> None:
        if at > self._runtime.now:
            self._runtime.now = max(self._runtime.now, self._member.wait(AwaitedInstant(at)))
