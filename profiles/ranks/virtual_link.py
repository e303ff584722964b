"""Links between ranks of one process, in virtual time.

A host's message arrives a latency after it was sent. Tensors leave on a queue of their own, at the link's bandwidth,
and land a latency later. Sends are buffered: they do not wait for the receiver.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ...sched.link import LinkError, Message
from ..platform.hardware import LinkProfile
from ..vgpu.copies import receive, send
from ..vgpu.device import VirtualGpu
from ..vgpu.engine import EventRecording, PeerEventRecording, StreamQueue
from ..vgpu.tensor import DeviceTensor
from .message_router import Departure, MessageInFlight, MessageRouter, RankInbox
from .rank_threads import Awaited, Member, awaited_instant

_LONGEST_SLEEP: Final = 60 * 10**9  # ns; a rank that waits without a deadline looks around that often


def awaited_head(inbox: RankInbox, source: int, tag: str) -> Awaited:
    """The host's part of a sender's next message, or the sender's end."""

    def reached() -> int | None:
        found = inbox.head(source, tag) or inbox.departures.get(source)
        return None if found is None else found.at

    return Awaited(reached)


def awaited_any(inbox: RankInbox, tags: Sequence[str], departed: set[int]) -> Awaited:
    """The next whole message of any sender, or the end of a rank that is not among the ``departed``."""

    def reached() -> int | None:
        known = [at for message, _ in inbox.heads(tags) if (at := message.whole_at) is not None]
        known += [inbox.silent_from(rank) for rank in inbox.departures if rank not in departed]
        return min(known, default=None)

    def marks() -> Sequence[EventRecording]:
        return [message.landing.recording for message, _ in inbox.heads(tags) if message.landing is not None]

    return Awaited(reached, marks)


class VirtualLink:
    """``router`` is shared by all ranks; ``patience`` is how long a rank waits for a message, ns."""

    def __init__(
        self,
        member: Member,
        gpu: VirtualGpu,
        router: MessageRouter,
        profile: LinkProfile,
        *,
        patience: int,
    ) -> None:
        self.rank, self.size = member.rank, len(router.names)
        self._member = member
        self._gpu = gpu
        self._router = router
        self._inbox = router.inboxes[member.rank]
        self._departed: set[int] = set()  # ranks that this rank has learned to be gone
        self._root = ""  # the first cause of what this rank waited for in vain
        self._profile = profile
        self._patience = patience
        self._queue: StreamQueue | None = None
        self._leaving: dict[str, list[tuple[EventRecording, Sequence[torch.Tensor]]]] = {}
        self._serial = 0

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        runtime, profile = self._gpu.runtime, self._profile
        payload = pickle.dumps(value)
        values, landing = self._send_tensors(tag, tensors) if tensors else ([], None)
        runtime.now += round(profile.call.value)
        at = runtime.now + round(profile.host_latency.value)
        self._serial += 1
        message = MessageInFlight(self.rank, self._serial, at, payload, values, landing, runtime.host_clock())
        self._router.put(to, tag, message)

    def flush(self, tag: str) -> None:
        for left, _ in self._leaving.pop(tag, ()):
            self._gpu.runtime.wait_event(self._gpu.runtime.stream, left)

    def receive(self, source: int, tag: str) -> Message:
        self._await_head(source, tag)
        return self._open(source, tag)

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every host waits here for the last one, for which a host under NCCL would not wait."""
        for rank, tensor in enumerate(tensors):
            if rank != self.rank:
                self._send_part(rank, tag, tensor)
        self.flush(tag)
        return [
            tensor if rank == self.rank else self.receive(rank, tag).tensors[0]
            for rank, tensor in enumerate(tensors)
        ]

    def _send_part(self, to: int, tag: str, tensor: torch.Tensor) -> None:
        """The receiver's host waits only until the copy is launched. An empty tensor is not copied."""
        assert isinstance(tensor, DeviceTensor)
        values, landing = self._send_tensors(tag, (tensor,)) if tensor.numel() else ([tensor.held], None)
        self._serial += 1
        now, payload = self._gpu.runtime.now, pickle.dumps(None)
        message = MessageInFlight(self.rank, self._serial, now, payload, values, landing, ())
        self._router.put(to, tag, message)

    def _send_tensors(
        self, tag: str, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], PeerEventRecording]:
        size = sum(tensor.nbytes for tensor in tensors)
        duration = round(size * 1e9 / self._profile.bandwidth.value)
        values, left = send(self._gpu, self._link_queue(), tensors, duration, name=f"send {tag}")
        self._leaving.setdefault(tag, []).append((left, tensors))  # kept until they have left
        return values, PeerEventRecording(left, round(self._profile.latency.value))

    def _await_head(self, source: int, tag: str) -> None:
        """Let the host wait for the next message of one sender. Raises LinkError."""
        runtime = self._gpu.runtime
        message = self._inbox.head(source, tag)
        if message is not None and message.at <= runtime.now:
            return
        deadline = runtime.now + self._patience
        if message is not None and not self._member.in_order:
            reached = min(message.at, deadline)
        else:
            reached = self._member.wait(awaited_head(self._inbox, source, tag), deadline)
        runtime.wait_for_host(reached, f"receive {tag}", runtime.stream)
        message = self._inbox.head(source, tag)
        if message is None or message.at > reached:
            raise LinkError(self._why_missing(source, tag, reached))

    def poll(self, tag: str) -> Message | None:
        runtime = self._gpu.runtime
        self._member.settle(runtime.now)
        arrived = [
            (at, message.source)
            for message, _ in self._inbox.heads((tag,))
            if (at := message.whole_at) is not None and at <= runtime.now
        ]
        return self._open(min(arrived)[1], tag) if arrived else None

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        runtime = self._gpu.runtime
        deadline = runtime.now + self._patience if until is None else min(until, runtime.now + _LONGEST_SLEEP)
        awaited = awaited_any(self._inbox, tags, self._departed)
        reached = self._member.wait(awaited, deadline)
        runtime.now = max(runtime.now, reached)
        arrived = awaited.reached()
        if until is None and (arrived is None or arrived > reached):
            raise LinkError(f"{self._waited} for any of {', '.join(sorted(tags))}")

    def gone(self) -> Mapping[int, str]:
        now, inbox = self._gpu.runtime.now, self._inbox
        self._member.settle(now)
        gone = {rank: left.why for rank, left in inbox.departures.items() if inbox.silent_from(rank) <= now}
        self._departed.update(gone)
        return gone

    def leave(self, why: str = "") -> None:
        """Announce that this rank sends no more, and why, if its work is not done."""
        root = (self._root or why) if why else ""
        self._depart(f"it stopped, since {root}" if why else "it has ended", root)

    def die(self, how: str) -> None:
        """End this rank at once; tensors that are still on their way are lost."""
        now = self._gpu.runtime.now
        self._member.settle(now)  # what has landed by now is known to have landed
        self._router.drop(self.rank, now)
        self._depart(how, f"{self._router.names[self.rank]} was {how}")

    def _depart(self, why: str, root: str) -> None:
        at = self._gpu.runtime.now + round(self._profile.host_latency.value)
        self._router.depart(self.rank, Departure(at, why, root))

    @property
    def _waited(self) -> str:
        return f"{self._router.names[self.rank]} waited {self._patience / 1e9:g} s"

    def _why_missing(self, source: int, tag: str, now: int) -> str:
        departure, name = self._inbox.departures.get(source), self._router.names[source]
        if departure is None or departure.at > now:
            return f"{self._waited} for '{tag}' of {name}"
        self._root = departure.root
        return f"{self._router.names[self.rank]} waited for '{tag}', and {name} is gone: {departure.why}"

    def _open(self, source: int, tag: str) -> Message:
        message = self._inbox.messages[source, tag].popleft()
        self._gpu.runtime.join_host_clock(message.known)
        tensors = receive(self._gpu, message.values, message.landing)
        return Message(source, pickle.loads(message.payload), tensors)

    def _link_queue(self) -> StreamQueue:
        """The queue of the link, made when tensors are first sent."""
        if self._queue is None:
            self._queue = self._gpu.runtime.simulation.queue()
            self._gpu.observer.streams[self._queue.id] = "link"
        return self._queue


class WorldClock:
    """A rank's host clock; while a rank sleeps, the others go on."""

    def __init__(self, gpu: VirtualGpu, member: Member) -> None:
        self._runtime = gpu.runtime
        self._member = member

    def now(self) -> int:
        return self._runtime.now

    def sleep_until(self, at: int) -> None:
        if at > self._runtime.now:
            self._runtime.now = max(self._runtime.now, self._member.wait(awaited_instant(at)))
