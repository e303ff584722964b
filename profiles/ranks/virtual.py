"""Links between ranks of one process, in virtual time.

A message of the host's arrives a latency after it was sent. Tensors leave by a queue of their own, at the link's
bandwidth, and land a latency later; a send is buffered: it does not wait for the receiver.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from ...sched.link import LinkError, Message
from ..platform.hardware import LinkProfile
from ..vgpu import VirtualGpu
from ..vgpu.engine import EventRecording, PeerEventRecording, StreamQueue
from ..vgpu.peer_copy import receive, send
from ..vgpu.tensor import DeviceTensor
from .rank_threads import AwaitedInstant, Member

_LOOK: Final = 60 * 10**9  # ns between two looks at nothing at all


class MessageInFlight(NamedTuple):
    """A message under way. The host's part arrives at ``at``, ns; the tensors when they have landed."""

    source: int
    serial: int
    at: int
    payload: bytes
    values: Sequence[torch.Tensor]
    landing: PeerEventRecording | None
    known: Sequence[int]  # what the sender's host came after

    @property
    def whole_at(self) -> int | None:
        """When all of it is there, as far as that is known."""
        if self.landing is None:
            return self.at
        landed = self.landing.time
        return None if landed is None else max(self.at, landed)


class Left(NamedTuple):
    """A rank's end, as others hear of it at ``at``, ns; what was at the ``root`` of it where its work was not done."""

    at: int
    why: str
    root: str


@dataclass(slots=True)
class RankInbox:
    """Messages to one rank, by sender and tag, in the order in which they come."""

    parcels: dict[tuple[int, str], deque[MessageInFlight]] = field(default_factory=dict)
    left: dict[int, Left] = field(default_factory=dict)  # ranks that send no more

    def put(self, tag: str, parcel: MessageInFlight) -> None:
        self.line(parcel.source, tag).append(parcel)

    def line(self, source: int, tag: str) -> deque[MessageInFlight]:
        """What is on its way."""
        return self.parcels.setdefault((source, tag), deque())

    def silent_from(self, rank: int) -> int:
        """When it is known that nothing more comes from a rank that has left: not before what is late."""
        lines = [parcels for (source, _), parcels in self.parcels.items() if source == rank]
        return max([self.left[rank].at, *(parcel.whole_at or 0 for parcels in lines for parcel in parcels)])

    def heads(self, tags: Sequence[str]) -> list[tuple[MessageInFlight, str]]:
        return [(parcels[0], tag) for (_, tag), parcels in self.parcels.items() if parcels and tag in tags]

    def head(self, source: int, tag: str) -> MessageInFlight | None:
        parcels = self.parcels.get((source, tag))
        return parcels[0] if parcels else None

    def take(self, source: int, tag: str) -> MessageInFlight:
        return self.parcels[source, tag].popleft()


class Post:
    """What carries messages between all ranks, which have ``names``."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.inboxes = [RankInbox() for _ in names]

    def put(self, to: int, tag: str, parcel: MessageInFlight) -> None:
        if to not in self.inboxes[parcel.source].left:
            self.inboxes[to].put(tag, parcel)

    def leave(self, rank: int, left: Left) -> None:
        """A rank is over; others hear of it once."""
        for inbox in self.inboxes:
            inbox.left.setdefault(rank, left)

    def lose(self, rank: int, now: int) -> None:
        """What a rank has sent and has not arrived whole never will; a host's own messages are out already."""
        for inbox in self.inboxes:
            for (source, _), parcels in inbox.parcels.items():
                if source == rank:
                    there = [parcel for parcel in parcels if parcel.landing is None or _whole(parcel, now)]
                    parcels.clear()
                    parcels.extend(there)


def _whole(parcel: MessageInFlight, now: int) -> bool:
    return parcel.whole_at is not None and parcel.whole_at <= now


class _AwaitedHead:
    """The next message of one sender: its host's part; or that there will be none."""

    def __init__(self, inbox: RankInbox, source: int, tag: str) -> None:
        self._inbox = inbox
        self._place = source, tag

    def reached(self) -> int | None:
        parcel, left = self._inbox.head(*self._place), self._inbox.left.get(self._place[0])
        if parcel is not None:
            return parcel.at
        return None if left is None else left.at

    def marks(self) -> Sequence[EventRecording]:
        return ()


class _AwaitedAny:
    """The next whole message of anybody; or the end of somebody who is not among the ``departed``."""

    def __init__(self, inbox: RankInbox, tags: Sequence[str], departed: set[int]) -> None:
        self._inbox = inbox
        self._tags = tags
        self._mourned = departed

    def reached(self) -> int | None:
        known = [at for parcel, _ in self._inbox.heads(self._tags) if (at := parcel.whole_at) is not None]
        inbox = self._inbox
        known += [inbox.silent_from(rank) for rank in inbox.left if rank not in self._mourned]
        return min(known, default=None)

    def marks(self) -> Sequence[EventRecording]:
        landings = [parcel.landing for parcel, _ in self._inbox.heads(self._tags)]
        return [landing.recording for landing in landings if landing is not None and landing.time is None]


class VirtualLink:
    """``post`` is shared by all ranks; ``patience`` is how long one waits for a message, ns."""

    def __init__(
        self,
        member: Member,
        gpu: VirtualGpu,
        post: Post,
        profile: LinkProfile,
        *,
        patience: int,
    ) -> None:
        self.rank, self.size = member.rank, len(post.names)
        self._member = member
        self._gpu = gpu
        self._post = post
        self._inbox = post.inboxes[member.rank]
        self._mourned: set[int] = set()  # ranks of which this one knows that they are gone
        self._root = ""  # of what this one waited for in vain
        self._profile = profile
        self._patience = patience
        self._queue: StreamQueue | None = None
        self._leaving: dict[str, list[tuple[EventRecording, Sequence[torch.Tensor]]]] = {}
        self._serial = 0

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        runtime, profile = self._gpu.runtime, self._profile
        payload = pickle.dumps(value)
        values: Sequence[torch.Tensor] = ()
        landing = None
        if tensors:
            values, landing = self._departed(tag, tensors)
            self._leaving.setdefault(tag, []).append((landing.recording, tensors))
        runtime.now += round(profile.call.value)
        self._serial += 1
        at = runtime.now + round(profile.host_latency.value)
        parcel = MessageInFlight(self.rank, self._serial, at, payload, values, landing, runtime.host_clock())
        self._post.put(to, tag, parcel)

    def flush(self, tag: str) -> None:
        for mark, _ in self._leaving.pop(tag, ()):
            self._gpu.runtime.wait_event(self._gpu.runtime.stream, mark)

    def receive(self, source: int, tag: str) -> Message:
        self._await_head(source, tag)
        return self._open(source, tag)

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The hosts meet: each goes on when the last one has come, which NCCL's would not wait for."""
        runtime = self._gpu.runtime
        for rank, tensor in enumerate(tensors):
            if rank != self.rank:
                self._give(rank, tag, tensor)
        for mark, _ in self._leaving.pop(tag, ()):
            runtime.wait_event(runtime.stream, mark)
        return [
            tensor if rank == self.rank else self._taken(rank, tag) for rank, tensor in enumerate(tensors)
        ]

    def _give(self, to: int, tag: str, tensor: torch.Tensor) -> None:
        """Nobody's host waits longer for it than until it is launched. Nothing is sent of nothing."""
        assert isinstance(tensor, DeviceTensor)
        values, landing = [tensor.held], None
        if tensor.numel():
            values, landing = self._departed(tag, (tensor,))
            self._leaving.setdefault(tag, []).append((landing.recording, (tensor,)))
        self._serial += 1
        parcel = MessageInFlight(self.rank, self._serial, self._gpu.runtime.now, b"", values, landing, ())
        self._post.put(to, tag, parcel)

    def _taken(self, source: int, tag: str) -> torch.Tensor:
        self._await_head(source, tag)
        parcel = self._inbox.take(source, tag)
        [tensor] = receive(self._gpu, parcel.values, parcel.landing)
        return tensor

    def _departed(
        self, tag: str, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], PeerEventRecording]:
        size = sum(tensor.nbytes for tensor in tensors)
        duration = round(size * 1e9 / self._profile.bandwidth.value)
        values, mark = send(self._gpu, self._egress(), tensors, duration, name=f"send {tag}")
        return values, PeerEventRecording(mark, round(self._profile.latency.value))

    def _await_head(self, source: int, tag: str) -> None:
        """The host waits for the next message of one sender."""
        runtime = self._gpu.runtime
        parcel = self._inbox.head(source, tag)
        if parcel is not None and parcel.at <= runtime.now:
            return
        deadline = runtime.now + self._patience
        reached = self._member.wait(_AwaitedHead(self._inbox, source, tag), deadline)
        runtime.wait_for_host(reached, f"receive {tag}", runtime.stream)
        parcel = self._inbox.head(source, tag)
        if parcel is None or parcel.at > reached:
            raise LinkError(self._in_vain(source, tag, reached))

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
        awaited = _AwaitedAny(self._inbox, tags, self._mourned)
        reached = self._member.wait(awaited, deadline)
        runtime.now = max(runtime.now, reached)
        there = awaited.reached()
        if until is None and (there is None or there > reached):
            raise LinkError(f"{self._waited} for any of {', '.join(sorted(tags))}")

    def gone(self) -> Mapping[int, str]:
        now, inbox = self._gpu.runtime.now, self._inbox
        ends = {rank: left.why for rank, left in inbox.left.items() if inbox.silent_from(rank) <= now}
        self._mourned.update(ends)
        return ends

    def leave(self, why: str = "") -> None:
        """Let the others know that nothing more comes from here, and why, if there should have been more."""
        root = (self._root or why) if why else ""
        self._post.leave(
            self.rank, Left(self._heard_at, f"it stopped, since {root}" if why else "it has ended", root)
        )

    def die(self, how: str) -> None:
        """Stop here and now; what is still on its way is lost."""
        self._post.lose(self.rank, self._gpu.runtime.now)
        root = f"{self._post.names[self.rank]} was {how}"
        self._post.leave(self.rank, Left(self._heard_at, how, root))

    @property
    def _heard_at(self) -> int:
        return self._gpu.runtime.now + round(self._profile.host_latency.value)

    @property
    def _waited(self) -> str:
        return f"{self._post.names[self.rank]} waited {self._patience / 1e9:g} s"

    def _in_vain(self, source: int, tag: str, now: int) -> str:
        left, name = self._inbox.left.get(source), self._post.names[source]
        if left is None or left.at > now:
            return f"{self._waited} for '{tag}' of {name}"
        self._root = left.root
        return f"{self._post.names[self.rank]} waited for '{tag}', and {name} is gone: {left.why}"

    def _open(self, source: int, tag: str) -> Message:
        parcel = self._inbox.take(source, tag)
        self._gpu.runtime.join_host_clock(parcel.known)
        return Message(
            source, pickle.loads(parcel.payload), receive(self._gpu, parcel.values, parcel.landing)
        )

    def _egress(self) -> StreamQueue:
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
