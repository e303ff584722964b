"""Links between processes: torch.distributed's point-to-point calls, over gloo.

A message is three sends to one peer: the lengths, a pickled head and the tensors' bytes. One thread per peer receives,
since a message of another tag may come first; whoever waits has a deadline.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...sched.link import LinkError, Message
from ...sched.observe import Clock
from .ports import Ports, Stamp

_BYE = "bye"


class _Arrived(NamedTuple):
    source: int
    payload: bytes
    values: list[torch.Tensor]
    stamp: Stamp | None


class ProcessLink:
    """``patience``: seconds that one waits for a message."""

    def __init__(self, ports: Ports, clock: Clock, *, patience: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._ports = ports
        self._clock = clock
        self._patience = patience
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._news = threading.Condition()
        self._arrived: dict[tuple[int, str], deque[_Arrived]] = {}
        self._gone: dict[int, str] = {}
        self._mourned: set[int] = set()  # of those, the ones that somebody has asked about
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), daemon=True)
            for peer in range(self.size)
            if peer != self.rank
        ]
        for thread in self._threads:
            thread.start()

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        values, stamp = self._ports.out(tensors, f"send {tag}")
        shapes = [(tuple(entry.shape), entry.dtype, entry.is_meta) for entry in values]
        head = _bytes(pickle.dumps((tag, pickle.dumps(value), shapes, stamp)))
        body = [entry.contiguous().flatten().view(torch.uint8) for entry in values if not entry.is_meta]
        whole = torch.cat(body) if body else torch.empty(0, dtype=torch.uint8)
        for part in (torch.tensor([head.numel(), whole.numel()]), head, whole):
            if part.numel() and to not in self._gone:
                self._start(to, part)
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def flush(self, tag: str) -> None:
        """What was sent has been read already; a virtual GPU's stream is told."""
        self._ports.flush(f"send {tag}")

    def receive(self, source: int, tag: str) -> Message:
        deadline = time.monotonic() + self._patience
        with self._news:
            while not self._arrived.get((source, tag)):
                left = deadline - time.monotonic()
                if source in self._gone:
                    raise LinkError(
                        f"rank {self.rank} waited for '{tag}', and rank {source} is gone: {self._gone[source]}"
                    )
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
        """Instants are of the rank's own clock, which is another one than the network's: sleeping costs no time."""
        deadline = time.monotonic() + (self._patience if until is None else 0)
        with self._news:
            while not self._news_of(tags):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(min(left, 1.0))
            else:
                return
        if until is None:
            raise LinkError(f"rank {self.rank} waited {self._patience:g} s for any of {', '.join(tags)}")
        self._clock.sleep_until(until)

    def gone(self) -> Mapping[int, str]:
        with self._news:
            self._mourned.update(self._gone)
            return dict(self._gone)

    def close(self) -> None:
        """Tell the others that no more will come, and wait until they have all that was sent."""
        for peer in range(self.size):
            if peer != self.rank and peer not in self._gone:
                self.send(peer, _BYE, None)
        for work, _ in self._sending:
            work.wait()
        for thread in self._threads:
            thread.join(self._patience)

    def _start(self, to: int, part: torch.Tensor) -> None:
        try:
            self._sending.append((dist.isend(part, to), part))
        except RuntimeError as error:
            self._lost(to, f"nothing can be sent to it: {_first_line(error)}")

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
                tag, payload, shapes, stamp = pickle.loads(head.numpy().tobytes())
                if tag == _BYE:
                    self._lost(peer, "it has ended")
                    return
                self._put(tag, _Arrived(peer, payload, _unpacked(body, shapes), stamp))
        except RuntimeError as error:
            self._lost(peer, _first_line(error))

    def _news_of(self, tags: Sequence[str]) -> bool:
        """Whether there is something to poll, or somebody to mourn."""
        arrived = any(waiting for (_, kind), waiting in self._arrived.items() if kind in tags)
        return arrived or bool(self._gone.keys() - self._mourned)

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


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
