"""Links between processes: torch.distributed's point-to-point calls, over gloo.

A message is three sends to one peer: the lengths, a pickled head and what goes along of the tensors' bytes. One thread
per peer receives, since a message of another tag may come first; whoever waits has a deadline. One thread sends, so
that Ctrl-C does not come between the parts of a message, and says every now and then that this process is alive: a
peer that is silent for as long as torch.distributed's timeout is gone.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from ...sched.link import FOREVER, LinkError, Message
from ...sched.observe import Clock
from .carriers import Carrier
from .ports import Ports, Stamp

_BYE = "bye"
_ALIVE = "alive"
_ENDED = "it has ended"
_GIVEN_UP = "it has given up"
_GRACE = 5.0  # seconds in which others have heard that this process gives up


class _Arrived(NamedTuple):
    source: int
    payload: bytes
    values: list[torch.Tensor]
    stamp: Stamp | None


class _Outgoing(NamedTuple):
    to: int
    head: torch.Tensor
    body: torch.Tensor


_SILENCE = _Outgoing(-1, torch.empty(0), torch.empty(0))


class ProcessLink:
    """``patience``: seconds that one waits for a message, and after which a silent peer is gone."""

    def __init__(self, ports: Ports, clock: Clock, *, patience: float, carrier: Carrier) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._carrier = carrier
        self._ports = ports
        self._clock = clock
        self._patience = patience
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._outgoing: SimpleQueue[_Outgoing | None] = SimpleQueue()
        self._beat = time.monotonic() + patience / 4
        self._news = threading.Condition()
        self._arrived: dict[tuple[int, str], deque[_Arrived]] = {}
        self._gone: dict[int, str] = {}
        self._sender = threading.Thread(target=self._talk, daemon=True)
        self._listeners = [
            threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in self._peers
        ]
        for thread in (self._sender, *self._listeners):
            thread.start()

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        values, stamp = self._ports.out(tensors, f"send {tag}")
        self._post(to, tag, value, values, stamp)

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
                    raise LinkError(
                        f"rank {self.rank} waited {self._patience:g} s for '{tag}' of rank {source}"
                    )
                self._news.wait(min(left, 1.0))
            arrived = self._arrived[source, tag].popleft()
        return self._opened(arrived)

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for rank, tensor in enumerate(tensors):
            if rank != self.rank:  # nothing is sent of nothing
                self.send(rank, tag, tensor.shape, (tensor,) if tensor.numel() else ())
        self.flush(tag)
        return [
            tensor if rank == self.rank else self._taken(rank, tag, tensor)
            for rank, tensor in enumerate(tensors)
        ]

    def _taken(self, source: int, tag: str, like: torch.Tensor) -> torch.Tensor:
        message = self.receive(source, tag)
        return message.tensors[0] if message.tensors else like.new_empty(message.value)

    def poll(self, tag: str) -> Message | None:
        with self._news:
            for (_, kind), waiting in self._arrived.items():
                if kind == tag and waiting:
                    arrived = waiting.popleft()
                    break
            else:
                return None
        return self._opened(arrived)

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        """Instants are of the rank's own clock; where that is a virtual one, sleeping costs no time."""
        if self._heard(tags, self._patience_until(until)) or until == FOREVER:
            return
        if until is None:
            raise LinkError(f"rank {self.rank} waited {self._patience:g} s for any of {', '.join(tags)}")
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
        for peer in self._peers:
            self._post(peer, _BYE, _ENDED if kind is None else _GIVEN_UP, (), None)
        self._outgoing.put(None)
        deadline = time.monotonic() + (self._patience if kind is None else _GRACE)
        for thread in (self._sender, *self._listeners):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _patience_until(self, until: int | None) -> float:
        if until is None or until == FOREVER:
            return self._patience
        return self._ports.seconds(until - self._clock.now())

    def _heard(self, tags: Sequence[str], patience: float) -> bool:
        """Whether there is something to poll by then. Raises LinkError where a peer has gone before its time."""
        deadline = time.monotonic() + patience
        with self._news:
            while not any(waiting for (_, kind), waiting in self._arrived.items() if kind in tags):
                for peer, why in self._gone.items():
                    if why != _ENDED:
                        raise self._missed(f"any of {', '.join(tags)}", peer)
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._news.wait(min(left, 1.0))
        return True

    def _missed(self, what: str, peer: int) -> LinkError:
        return LinkError(f"rank {self.rank} waited for {what}, and rank {peer} is gone: {self._gone[peer]}")

    def _post(
        self, to: int, tag: str, value: Any, values: Sequence[torch.Tensor], stamp: Stamp | None
    ) -> None:
        shapes = [(tuple(entry.shape), entry.dtype, entry.is_meta) for entry in values]
        body = [entry.contiguous().flatten().view(torch.uint8) for entry in values if not entry.is_meta]
        whole = torch.cat(body) if body else torch.empty(0, dtype=torch.uint8)
        told, along = self._carrier.give(whole)
        head = _bytes(pickle.dumps((tag, pickle.dumps(value), shapes, stamp, told)))
        self._outgoing.put(_Outgoing(to, head, along))

    def _talk(self) -> None:
        under_way: deque[tuple[Any, torch.Tensor]] = deque()
        while (message := self._next()) is not None:
            while under_way and _over(under_way[0][0]):
                under_way.popleft()
            if message.to in self._gone:
                continue
            lengths = torch.tensor([message.head.numel(), message.body.numel()])
            try:
                for part in (lengths, message.head, message.body):
                    if part.numel():
                        under_way.append((dist.isend(part, message.to), part))
            except RuntimeError as error:
                self._lost(message.to, _said(error))
        for work, _ in under_way:
            with suppress(RuntimeError):  # who is gone needs nothing
                work.wait()

    def _next(self) -> _Outgoing | None:
        """What is to be sent; every now and then, to everybody, that this process is alive."""
        while True:
            try:
                message = self._outgoing.get(timeout=max(0.0, self._beat - time.monotonic()))
            except Empty:
                message = _SILENCE
            if time.monotonic() >= self._beat:
                self._beat = time.monotonic() + self._patience / 4
                for peer in self._peers:
                    self._post(peer, _ALIVE, None, (), None)
            if message is not _SILENCE:
                return message

    def _listen(self, peer: int) -> None:
        try:
            while True:
                lengths = torch.empty(2, dtype=torch.int64)
                dist.recv(lengths, peer)
                head_size, size = lengths.tolist()
                head = torch.empty(head_size, dtype=torch.uint8)
                dist.recv(head, peer)
                body = torch.empty(size, dtype=torch.uint8)
                if size:
                    dist.recv(body, peer)
                tag, payload, shapes, stamp, told = pickle.loads(head.numpy().tobytes())
                if tag == _BYE:
                    self._lost(peer, pickle.loads(payload))
                    return
                if tag == _ALIVE:
                    continue
                self._put(
                    tag, _Arrived(peer, payload, _unpacked(self._carrier.take(told, body), shapes), stamp)
                )
        except RuntimeError as error:
            self._lost(peer, _said(error))

    def _put(self, tag: str, arrived: _Arrived) -> None:
        with self._news:
            self._arrived.setdefault((arrived.source, tag), deque()).append(arrived)
            self._news.notify_all()

    def _lost(self, peer: int, why: str) -> None:
        with self._news:
            self._gone.setdefault(peer, why)
            self._news.notify_all()

    def _opened(self, arrived: _Arrived) -> Message:
        return Message(
            arrived.source, pickle.loads(arrived.payload), self._ports.into(arrived.values, arrived.stamp)
        )


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(
    body: torch.Tensor, shapes: Sequence[tuple[tuple[int, ...], torch.dtype, bool]]
) -> list[torch.Tensor]:
    values, begin = [], 0
    for shape, dtype, is_meta in shapes:
        entry = torch.empty(shape, dtype=dtype, device="meta" if is_meta else "cpu")
        if not is_meta:
            size = entry.nbytes
            entry.flatten().view(torch.uint8).copy_(body[begin : begin + size])
            begin += size
        values.append(entry)
    return values


def _over(work: Any) -> bool:
    """Sent, or never to be."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return True


def _said(error: BaseException) -> str:
    """Gloo's words without the place in its source, and without its advice."""
    line = str(error).strip().splitlines()[0]
    return line.partition("] ")[2].partition(". ")[0] if line.startswith("[") else line
