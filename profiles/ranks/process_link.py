"""Links between processes: torch.distributed's point-to-point calls, over gloo.

Per peer one thread receives, since a message of another tag may come first, and one sends, so that Ctrl-C does not
come between the parts of a message, and so that a peer that hangs holds up nobody else. Whoever waits has a deadline.
Who has nothing to say says every now and then that it is alive: a peer that is silent for as long as
torch.distributed's timeout is gone.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import torch
import torch.distributed as dist

from ...sched.link import FOREVER, LinkError, Message
from ...sched.observe import Clock
from .carriers import Carrier
from .ports import Ports
from .wire import Arrived, Head, hear, packed, shapes, speak, written

_BYE: Final = "bye"
_ALIVE: Final = "alive"
_ENDED: Final = "it has ended"
_GIVEN_UP: Final = "it has given up"
_GRACE: Final = 5.0  # seconds in which others have heard that this process gives up
_MEANINGS: Final = MappingProxyType(
    {
        "timed out": "it does not answer",
        "timeout": "it does not answer",
        "closed by peer": "its connection is closed",
        "reset by peer": "its connection is closed",
        "broken pipe": "its connection is closed",
    }
)
_GLANCE: Final = 1e-4  # seconds between two looks at tensors that are on their way


class _Outgoing(NamedTuple):
    head: torch.Tensor
    along: torch.Tensor


class ProcessLink:
    """``names``: of the ranks. ``patience``: seconds that one waits for a message, and after which a silent peer is
    gone."""

    def __init__(
        self, names: Sequence[str], ports: Ports, clock: Clock, *, patience: float, carrier: Carrier
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._names = names
        self._carrier = carrier
        self._ports = ports
        self._clock = clock
        self._patience = patience
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._outgoing: dict[int, SimpleQueue[_Outgoing | None]] = {
            peer: SimpleQueue() for peer in self._peers
        }
        self._news = threading.Condition()
        self._arrived: dict[tuple[int, str], deque[Arrived]] = {}
        self._gone: dict[int, str] = {}
        self._threads = [
            threading.Thread(target=work, args=(peer,), daemon=True)
            for peer in self._peers
            for work in (self._talk, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        values, stamp = self._ports.out(tensors, f"send {tag}")
        self._give(to, Head(tag, pickle.dumps(value), shapes(values), stamp, None), values)

    def _give(self, to: int, head: Head, values: Sequence[torch.Tensor]) -> None:
        whole = packed(values)
        told, along = self._carrier.give(to, whole)
        self._outgoing[to].put(_Outgoing(written(head._replace(told=told)), along))
        self._carrier.push(to, whole)

    def flush(self, tag: str) -> None:
        self._ports.flush(f"send {tag}")

    def receive(self, source: int, tag: str) -> Message:
        deadline = time.monotonic() + self._patience
        with self._news:
            while not self._arrived.get((source, tag)):
                left = deadline - time.monotonic()
                if source in self._gone:
                    raise self._missed(f"'{tag}'", source)
                if left <= 0:
                    raise self._waited(f"'{tag}' of {self._names[source]}")
                self._news.wait(min(left, 1.0))
            arrived = self._arrived[source, tag].popleft()
        return self._opened(arrived)

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for rank, tensor in enumerate(tensors):
            if rank != self.rank:
                self._exchange(rank, tag, tensor)
        self.flush(tag)
        return [
            tensor if rank == self.rank else self._taken(rank, tag, tensor)
            for rank, tensor in enumerate(tensors)
        ]

    def _exchange(self, to: int, tag: str, tensor: torch.Tensor) -> None:
        """Nothing is sent of nothing. No host learns from it what another one knows."""
        values, stamp = self._ports.out((tensor,) if tensor.numel() else (), f"send {tag}")
        stamp = stamp and stamp._replace(host_knows=())
        self._give(to, Head(tag, pickle.dumps(tensor.shape), shapes(values), stamp, None), values)

    def _taken(self, source: int, tag: str, like: torch.Tensor) -> torch.Tensor:
        message = self.receive(source, tag)
        return message.tensors[0] if message.tensors else like.new_empty(message.value)

    def poll(self, tag: str) -> Message | None:
        with self._news:
            whole = next(self._whole((tag,)), None)
            if whole is None:
                return None
            arrived = whole.popleft()
        return self._opened(arrived)

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        """Instants are of the rank's own clock; where that is a virtual one, sleeping costs no time."""
        if self._heard(tags, self._patience_until(until)) or until == FOREVER:
            return
        if until is None:
            raise self._waited(f"any of {', '.join(tags)}")
        self._clock.sleep_until(until)

    def gone(self) -> Mapping[int, str]:
        """Those that have ended. One that has gone before its time leaves nothing for others to go on with: what each
        has to tell is put together by the first one. Raises LinkError."""
        with self._news:
            for peer, why in self._gone.items():
                if why != _ENDED:
                    raise self._missed("all others", peer)
            return dict(self._gone)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell the others that no more will come, and wait until they have all that was sent, and have said the same:
        a thread that still listened when Python ends would end it with a crash."""
        if kind is None:
            self._carrier.close()
        bye = _outgoing(_BYE, _ENDED if kind is None else _GIVEN_UP)
        for queue in self._outgoing.values():
            queue.put(bye)
            queue.put(None)
        deadline = time.monotonic() + (self._patience if kind is None else _GRACE)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _patience_until(self, until: int | None) -> float:
        if until is None or until == FOREVER:
            return self._patience
        return self._ports.seconds(until - self._clock.now())

    def _heard(self, tags: Sequence[str], patience: float) -> bool:
        """Whether there is something to poll by then. Raises LinkError where a peer has gone before its time."""
        deadline = time.monotonic() + patience
        with self._news:
            while next(self._whole(tags), None) is None:
                for peer, why in self._gone.items():
                    if why != _ENDED:
                        raise self._missed(f"any of {', '.join(tags)}", peer)
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._news.wait(min(left, _GLANCE if any(self._awaiting(tags)) else 1.0))
        return True

    def _whole(self, tags: Sequence[str]) -> Iterator[deque[Arrived]]:
        """Messages of those tags, by sender, whose next one has its tensors."""
        return (waiting for waiting in self._awaiting(tags) if waiting[0].parcel.landed())

    def _awaiting(self, tags: Sequence[str]) -> Iterator[deque[Arrived]]:
        return (waiting for (_, kind), waiting in self._arrived.items() if kind in tags and waiting)

    def _missed(self, what: str, peer: int) -> LinkError:
        own, other = self._names[self.rank], self._names[peer]
        return LinkError(f"{own} waited for {what}, and {other} is gone: {self._gone[peer]}")

    def _waited(self, what: str) -> LinkError:
        return LinkError(f"{self._names[self.rank]} waited {self._patience:g} s for {what}")

    def _talk(self, peer: int) -> None:
        """Until the link is left; to who is gone nothing is said."""
        while (message := self._next(peer)) is not None:
            if peer in self._gone:
                continue
            try:
                speak(peer, *message)
            except RuntimeError as error:
                self._lost(peer, _said(error))

    def _next(self, peer: int) -> _Outgoing | None:
        try:
            return self._outgoing[peer].get(timeout=self._patience / 4)
        except Empty:
            return _outgoing(_ALIVE, None)

    def _listen(self, peer: int) -> None:
        try:
            while True:
                head, along = hear(peer)
                if head.tag == _BYE:
                    self._lost(peer, pickle.loads(head.value))
                    return
                if head.tag != _ALIVE:
                    self._put(Arrived(peer, head, self._carrier.take(peer, head.told, along)))
        except RuntimeError as error:
            self._lost(peer, _said(error))

    def _put(self, arrived: Arrived) -> None:
        with self._news:
            self._arrived.setdefault((arrived.source, arrived.head.tag), deque()).append(arrived)
            self._news.notify_all()

    def _lost(self, peer: int, why: str) -> None:
        with self._news:
            self._gone.setdefault(peer, why)
            self._news.notify_all()

    def _opened(self, arrived: Arrived) -> Message:
        tensors = self._ports.into(arrived.tensors(), arrived.head.stamp)
        return Message(arrived.source, pickle.loads(arrived.head.value), tensors)


def _outgoing(tag: str, value: Any) -> _Outgoing:
    """Of a message without tensors."""
    head = Head(tag, pickle.dumps(value), (), None, None)
    return _Outgoing(written(head), torch.empty(0, dtype=torch.uint8))


def _said(error: BaseException) -> str:
    """Of gloo's words what happened; where they are others, without the place in its source, and without its advice."""
    line = str(error).strip().splitlines()[0]
    words = line.partition("] ")[2].partition(". ")[0] if line.startswith("[") else line
    return next((meaning for sign, meaning in _MEANINGS.items() if sign in words.lower()), words)
