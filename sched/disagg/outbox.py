"""The prefill worker's side of a transfer: a sender for each request (upstream ``DisaggPrefillBootstrapQueue`` and its
inflight queue).

    bootstrapping   until the decode worker has allocated pages for the prompt
    waiting         queued for prefill, or being computed; chunks are sent as they are computed
    transferring    everything has been enqueued for sending
    success         everything has been sent: KV and row can be released
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from ..observe import Observer
from ..request import Request
from .kv import DisaggComponents
from .layout import HANDSHAKE, KV, Chunk, Dropped, Failed, Metadata, Preallocated


@dataclass(slots=True, eq=False)
class _Sender:
    req: Request
    pages: tuple[int, ...]  # of the decode worker, in the order of the prompt
    sent: int = 0  # positions before this one have been enqueued for sending
    cached: int = 0  # positions before this one belong to launched steps, and their slots stay as they are
    kept: list[object] = field(default_factory=list)  # tensors that are still being sent
    finished: Any = None  # event behind which everything has been sent


class Outbox:
    """With ``overlapped`` a chunk counts as computed only when its step has been settled."""

    def __init__(self, components: DisaggComponents, observer: Observer, *, overlapped: bool) -> None:
        self._components = components
        self._layout = components.layout
        self._overlapped = overlapped
        self._stream = components.transfer_stream(observer)
        self._bootstrap: dict[str, Request] = {}
        self._handshakes: dict[str, Preallocated | Dropped] = {}  # received, and not acted upon yet
        self._senders: dict[str, _Sender] = {}
        self._transferring: list[_Sender] = []

    @property
    def requests(self) -> list[Request]:
        """All requests that are here."""
        return [*self._bootstrap.values(), *(sender.req for sender in self._senders.values()), *self.held]

    @property
    def held(self) -> list[Request]:
        """Requests whose KV is completely enqueued for sending and not released yet."""
        return [sender.req for sender in self._transferring]

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for its decode worker."""
        return bool(self._bootstrap)

    def enqueue(self, req: Request) -> None:
        """Let a request that has arrived wait for its decode worker."""
        self._bootstrap[req.id] = req

    def receive_handshakes(self) -> list[Request]:
        """Take the messages of decode workers. Returns requests that can be prefilled now, in order of arrival."""
        while (message := self._components.link.poll(HANDSHAKE)) is not None:
            self._handshakes[message.value.id] = message.value
        answered = [name for name in self._bootstrap if name in self._handshakes]
        ready: list[Request] = []
        for name in answered:
            req, handshake = self._bootstrap.pop(name), self._handshakes.pop(name)
            if isinstance(handshake, Preallocated):
                self._senders[name] = _Sender(req, handshake.pages)
                ready.append(req)
            elif handshake.preallocated:
                self._send_to_decode(req, Failed(name))
        return ready

    def take_dropped(self) -> list[Request]:
        """Requests with a sender that their decode workers have dropped since the last call."""
        found = [sender for name, sender in self._senders.items() if name in self._handshakes]
        for sender in found:
            del self._handshakes[sender.req.id]
        return [sender.req for sender in found]

    def take_orphaned(self, gone: Collection[int]) -> list[Request]:
        """Remove and return requests that wait for a decode worker among the ``gone`` ranks."""
        found = [req for req in self._bootstrap.values() if self._layout.decode_of(req.index) in gone]
        for req in found:
            del self._bootstrap[req.id]
        return found

    def sent_to(self, ranks: Collection[int]) -> list[Request]:
        """Requests with a sender to one of ``ranks``."""
        senders = self._senders.values()
        return [sender.req for sender in senders if self._layout.decode_of(sender.req.index) in ranks]

    def expire(self, reason: str) -> list[tuple[Request, str]]:
        """Remove all requests that wait for a decode worker, because none has answered in time. Returns each with the
        reason of its failure."""
        layout = self._layout
        found = [
            (req, f"{layout.name_of(layout.decode_of(req.index))} allocated no pages for it: {reason}")
            for req in self._bootstrap.values()
        ]
        self._bootstrap.clear()
        for req, why in found:
            self._send_to_decode(req, Failed(req.id, why))
        return found

    def fail(self, req: Request) -> None:
        """Remove ``req``, which has ended without its prompt, and notify its decode worker."""
        del self._senders[req.id]
        self._send_to_decode(req, Failed(req.id))

    def chunk_cached(self, req: Request) -> None:
        """Note that the cache has taken over a chunk: the row's slots of these positions stay as they are."""
        sender = self._senders[req.id]
        sender.cached = req.fill_len
        if not self._overlapped:
            self._send(sender, sender.cached, None)

    def chunk_computed(self, req: Request) -> None:
        """Note that a chunk's step has been settled, after the cache had taken over that chunk or the next one."""
        sender = self._senders[req.id]
        if self._overlapped:
            self._send(sender, sender.cached, None)

    def finish(self, req: Request, metadata: Metadata) -> None:
        """Send the rest of a prompt that is computed completely and that the cache has taken over."""
        sender = self._senders.pop(req.id)
        self._send(sender, req.fill_len, metadata)
        components = self._components
        with components.streams.on(components.streams.copy):
            components.link.flush(KV)
            sender.finished = components.streams.module.Event()
            sender.finished.record()
        self._transferring.append(sender)

    def take_sent(self, has_left: Callable[[Any], bool]) -> list[Request]:
        """Requests whose KV can be released. ``has_left`` is called with the event behind which all of it is sent."""
        sent = [sender for sender in self._transferring if has_left(sender.finished)]
        self._transferring = [sender for sender in self._transferring if sender not in sent]
        return [sender.req for sender in sent]

    def close(self) -> None:
        """End the workload: handshakes that came too late belong to no request."""
        self._handshakes.clear()

    def _send(self, sender: _Sender, stop: int, metadata: Metadata | None) -> None:
        """Send the positions up to ``stop`` that have not been sent yet."""
        start, req, components = sender.sent, sender.req, self._components
        first = start // components.cache.page_size
        pages = sender.pages[first : first + len(components.page_list(req.row, start, stop))]
        row = components.cache.req_to_token_pool.req_to_token[req.row]
        slots = row[start:stop].to(torch.int64)
        streams = components.streams
        streams.wait(self._stream, streams.schedule)
        with streams.on(self._stream):
            tensors = components.port.gather(slots)
            self._send_to_decode(req, Chunk(req.id, start, stop, pages, metadata), tensors)
        sender.kept += [slots, *tensors]
        sender.sent = stop

    def _send_to_decode(self, req: Request, value: Chunk | Failed, tensors: Any = ()) -> None:
        self._components.link.send(self._layout.decode_of(req.index), KV, value, tensors)
