"""Links between processes: torch.distributed's point-to-point calls, over gloo.

Per peer one thread receives, since a message of another tag may come first, and one thread sends, so that Ctrl-C does
not interrupt a message, and a peer that hangs delays no other peer. Every wait has a deadline. A rank that has nothing
to send sends a keep-alive message from time to time: a peer that is silent for torch.distributed's timeout is gone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Self

import torch
import torch.distributed as dist

from ...sched.link import FOREVER, LinkError, Message
from ...sched.observe import Clock
from .codec import MalformedMessageError
from .staging import TensorStaging
from .transports import NO_BYTES, TensorTransport
from .wire import ArrivedMessage, MessageFormat, MessageHead, packed, receive_message, send_message, shapes_of

_BYE: Final = "bye"
_ALIVE: Final = "alive"
_ENDED: Final = "it has ended"
_GIVEN_UP: Final = "it has given up"
_GRACE: Final = 5.0  # seconds in which others receive that this process gives up
_MEANINGS: Final[Mapping[str, str]] = {
    "timed out": "it does not answer",
    "timeout": "it does not answer",
    "closed by peer": "its connection is closed",
    "reset by peer": "its connection is closed",
    "broken pipe": "its connection is closed",
}
_POLL_S: Final = 1e-4  # seconds between two looks at tensors that are on their way


class _Outgoing(NamedTuple):
    head: torch.Tensor
    inline: torch.Tensor


class ProcessLink:
    """``names``: of the ranks. ``types``: of each tag's values. ``patience``: seconds that a rank waits for a message,
    and after which a silent peer is gone."""

    def __init__(
        self,
        names: Sequence[str],
        staging: TensorStaging,
        clock: Clock,
        *,
        patience: float,
        transport: TensorTransport,
        types: Mapping[str, Any],
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._names = names
        self._transport = transport
        self._format = MessageFormat({**types, _BYE: str, _ALIVE: None}, transport.ticket_type)
        self._staging = staging
        self._clock = clock
        self._patience = patience
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._outgoing: dict[int, SimpleQueue[_Outgoing | None]] = {
            peer: SimpleQueue() for peer in self._peers
        }
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, str], deque[ArrivedMessage]] = {}
        self._gone: dict[int, str] = {}
        self._threads = [
            threading.Thread(target=work, args=(peer,), daemon=True)
            for peer in self._peers
            for work in (self._send_queued, self._receive_all)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        values, times = self._staging.export(tensors, f"send {tag}")
        self._queue(to, MessageHead(tag, value, shapes_of(values), times), values)

    def _queue(self, to: int, head: MessageHead, values: Sequence[torch.Tensor]) -> None:
        body = packed(values)
        ticket, inline = self._transport.offer(to, body)
        self._outgoing[to].put(_Outgoing(self._format.encoded(head._replace(ticket=ticket)), inline))
        self._transport.push(to, body)

    def flush(self, tag: str) -> None:
        self._staging.flush(f"send {tag}")

    def receive(self, source: int, tag: str) -> Message:
        deadline = time.monotonic() + self._patience
        with self._changed:
            while not self._arrived.get((source, tag)):
                remaining = deadline - time.monotonic()
                if source in self._gone:
                    raise self._peer_gone(f"'{tag}'", source)
                if remaining <= 0:
                    raise self._waited(f"'{tag}' of {self._names[source]}")
                self._changed.wait(min(remaining, 1.0))
            arrived = self._arrived[source, tag].popleft()
        return self._placed(arrived)

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for rank, tensor in enumerate(tensors):
            if rank != self.rank:
                self._send_part(rank, tag, tensor)
        self.flush(tag)
        return [
            tensor if rank == self.rank else self._receive_part(rank, tag, tensor)
            for rank, tensor in enumerate(tensors)
        ]

    def _send_part(self, to: int, tag: str, tensor: torch.Tensor) -> None:
        """An empty tensor is not copied. The part orders devices, not hosts, and has no host's vector clock."""
        values, times = self._staging.export((tensor,) if tensor.numel() else (), f"send {tag}")
        times = times and times._replace(host_known=())
        self._queue(to, MessageHead(tag, tensor.shape, shapes_of(values), times), values)

    def _receive_part(self, source: int, tag: str, like: torch.Tensor) -> torch.Tensor:
        message = self.receive(source, tag)
        return message.tensors[0] if message.tensors else like.new_empty(message.value)

    def poll(self, tag: str) -> Message | None:
        with self._changed:
            whole = next(self._whole((tag,)), None)
            if whole is None:
                return None
            arrived = whole.popleft()
        return self._placed(arrived)

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        """``until`` is of the rank's own clock; with a virtual clock, sleeping takes no real time."""
        if self._can_poll(tags, self._seconds_until(until)) or until == FOREVER:
            return
        if until is None:
            raise self._waited(f"any of {', '.join(tags)}")
        self._clock.sleep_until(until)

    def gone(self) -> Mapping[int, str]:
        """Ranks that have ended. Raises LinkError where one is gone before its end: the first rank needs the reports of
        all."""
        with self._changed:
            for peer, why in self._gone.items():
                if why != _ENDED:
                    raise self._peer_gone("all others", peer)
            return dict(self._gone)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Announce the end, and wait until the others have everything and have announced theirs: Python would crash at
        its end in a thread that still receives."""
        if kind is None:
            self._transport.close()
        bye = self._without_tensors(_BYE, _ENDED if kind is None else _GIVEN_UP)
        for queue in self._outgoing.values():
            queue.put(bye)
            queue.put(None)
        deadline = time.monotonic() + (self._patience if kind is None else _GRACE)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _seconds_until(self, until: int | None) -> float:
        if until is None or until == FOREVER:
            return self._patience
        return self._staging.seconds(until - self._clock.now())

    def _can_poll(self, tags: Sequence[str], patience: float) -> bool:
        """Whether there is something to poll within ``patience`` seconds. Raises LinkError where a peer is gone before
        its end."""
        deadline = time.monotonic() + patience
        with self._changed:
            while next(self._whole(tags), None) is None:
                for peer, why in self._gone.items():
                    if why != _ENDED:
                        raise self._peer_gone(f"any of {', '.join(tags)}", peer)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(min(remaining, _POLL_S if any(self._queues(tags)) else 1.0))
        return True

    def _whole(self, tags: Sequence[str]) -> Iterator[deque[ArrivedMessage]]:
        """The queues of those tags whose first message has its tensors."""
        return (queue for queue in self._queues(tags) if queue[0].body.arrived())

    def _queues(self, tags: Sequence[str]) -> Iterator[deque[ArrivedMessage]]:
        return (queue for (_, tag), queue in self._arrived.items() if tag in tags and queue)

    def _peer_gone(self, what: str, peer: int) -> LinkError:
        own, other = self._names[self.rank], self._names[peer]
        return LinkError(f"{own} waited for {what}, and {other} is gone: {self._gone[peer]}")

    def _waited(self, what: str) -> LinkError:
        return LinkError(f"{self._names[self.rank]} waited {self._patience:g} s for {what}")

    def _send_queued(self, peer: int) -> None:
        """Send until the link is closed; messages to a peer that is gone are dropped."""
        while (message := self._next(peer)) is not None:
            if peer in self._gone:
                continue
            try:
                send_message(peer, *message)
            except RuntimeError as error:
                self._mark_gone(peer, _reason(error))

    def _next(self, peer: int) -> _Outgoing | None:
        try:
            return self._outgoing[peer].get(timeout=self._patience / 4)
        except Empty:
            return self._without_tensors(_ALIVE, None)

    def _receive_all(self, peer: int) -> None:
        try:
            while True:
                head, inline = receive_message(peer, self._format)
                if head.tag == _BYE:
                    self._mark_gone(peer, head.value)
                    return
                if head.tag != _ALIVE:
                    self._put(ArrivedMessage(peer, head, self._transport.take(peer, head.ticket, inline)))
        except RuntimeError as error:
            self._mark_gone(peer, _reason(error))
        except MalformedMessageError as error:
            self._mark_gone(peer, f"it sent what is no message: {error}")

    def _put(self, arrived: ArrivedMessage) -> None:
        with self._changed:
            self._arrived.setdefault((arrived.source, arrived.head.tag), deque()).append(arrived)
            self._changed.notify_all()

    def _mark_gone(self, peer: int, why: str) -> None:
        with self._changed:
            self._gone.setdefault(peer, why)
            self._changed.notify_all()

    def _without_tensors(self, tag: str, value: str | None) -> _Outgoing:
        return _Outgoing(self._format.encoded(MessageHead(tag, value)), NO_BYTES)

    def _placed(self, arrived: ArrivedMessage) -> Message:
        tensors = self._staging.place(arrived.tensors(), arrived.head.times)
        return Message(arrived.source, arrived.head.value, tensors)


def _reason(error: BaseException) -> str:
    """What happened, by gloo's message; of a message that is not known, the text without source position and advice."""
    line = str(error).strip().splitlines()[0]
    words = line.partition("] ")[2].partition(". ")[0] if line.startswith("[") else line
    return next((meaning for phrase, meaning in _MEANINGS.items() if phrase in words.lower()), words)
