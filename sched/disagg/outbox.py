"""The prefill worker's side of a transfer: a sender for each request (upstream ``DisaggPrefillBootstrapQueue`` and its
inflight queue).

    bootstrapping   until the decode worker has pages for the prompt
    waiting         queued for prefill, or under way; chunks are sent as they are computed
    transferring    all is sent, not all has left
    success         it has: KV and row may go
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from ..observe import Observer
from ..request import Request
from .messages import HANDSHAKE, KV, Chunk, Dropped, Failed, Metadata, Preallocated
from .parts import DisaggComponents
from .place import RankLayout


@dataclass(slots=True)
class _Sender:
    req: Request
    pages: tuple[int, ...]  # of the decode worker, in the order of the prompt
    sent: int = 0  # positions before this one are on their way
    cached: int = 0  # positions before this one will not move any more, and belong to launched steps
    kept: list[object] = field(default_factory=list)  # tensors that have not left yet


@dataclass(slots=True)
class _Leaving:
    sender: _Sender
    gone: Any  # event behind which everything has left


class Outbox:
    """``overlapped``: a chunk is known to be computed only when its step is settled."""

    def __init__(self, parts: DisaggComponents, observer: Observer, *, overlapped: bool) -> None:
        self._parts = parts
        self._overlapped = overlapped
        self._stream = parts.transfer_stream(observer)
        self._bootstrap: dict[str, Request] = {}
        self._early: dict[str, Preallocated | Dropped] = {}  # said of requests, and not taken up yet
        self._senders: dict[str, _Sender] = {}
        self._leaving: list[_Leaving] = []

    @property
    def held(self) -> list[Request]:
        """Requests that all is sent of, and that still have their KV."""
        return [leaving.sender.req for leaving in self._leaving]

    @property
    def waits(self) -> bool:
        """Whether some request waits for its decode worker."""
        return bool(self._bootstrap)

    def expect(self, req: Request) -> None:
        """A request has come in: it waits for its decode worker."""
        self._bootstrap[req.id] = req

    def hear(self) -> list[Request]:
        """What decode workers have said: requests that may be prefilled now, in order of arrival."""
        while (message := self._parts.link.poll(HANDSHAKE)) is not None:
            self._early[message.value.id] = message.value
        said = [name for name in self._bootstrap if name in self._early]
        ready: list[Request] = []
        for name in said:
            req, word = self._bootstrap.pop(name), self._early.pop(name)
            if isinstance(word, Preallocated):
                self._senders[name] = _Sender(req, word.pages)
                ready.append(req)
            elif word.preallocated:
                self._tell(req, Failed(name))
        return ready

    def dropped(self) -> list[Request]:
        """Requests under way that their decode worker has dropped since the last time."""
        found = [sender for name, sender in self._senders.items() if name in self._early]
        for sender in found:
            del self._early[sender.req.id]
        return [sender.req for sender in found]

    def orphaned(self, gone: Collection[int]) -> list[Request]:
        """Requests that wait for a decode worker which is among the ``gone`` ranks: they are nobody's now."""
        found = [req for req in self._bootstrap.values() if self._place.decode_of(req.index) in gone]
        for req in found:
            del self._bootstrap[req.id]
        return found

    def sent_to(self, ranks: Collection[int]) -> list[Request]:
        """Requests under way to them."""
        senders = self._senders.values()
        return [sender.req for sender in senders if self._place.decode_of(sender.req.index) in ranks]

    def expire(self, reason: str) -> list[tuple[Request, str]]:
        """No decode worker has said anything for as long as one waits: requests that wait for one have ended."""
        place = self._place
        found = [
            (req, f"{place.name_of(place.decode_of(req.index))} gave it no room: {reason}")
            for req in self._bootstrap.values()
        ]
        self._bootstrap.clear()
        for req, why in found:
            self._tell(req, Failed(req.id, why))
        return found

    def surrender(self) -> list[Request]:
        """All that are here, for good."""
        sending = [sender.req for sender in self._senders.values()]
        found = [*self._bootstrap.values(), *sending, *self.held]
        for part in (self._bootstrap, self._early, self._senders, self._leaving):
            part.clear()
        return found

    def fail(self, req: Request) -> None:
        """``req`` has ended here without its prompt."""
        del self._senders[req.id]
        self._tell(req, Failed(req.id))

    def chunk_cached(self, req: Request) -> None:
        """The cache has taken over a chunk: the row's slots of these positions stay as they are."""
        sender = self._senders[req.id]
        sender.cached = req.fill_len
        if not self._overlapped:
            self._send(sender, sender.cached, None)

    def chunk_computed(self, req: Request) -> None:
        """A chunk's step has been settled, after the cache had taken over the next one's, or its own."""
        sender = self._senders[req.id]
        if self._overlapped:
            self._send(sender, sender.cached, None)

    def finish(self, req: Request, metadata: Metadata) -> None:
        """The whole prompt is computed, and the cache has taken it over."""
        sender = self._senders.pop(req.id)
        self._send(sender, req.fill_len, metadata)
        parts = self._parts
        with parts.streams.on(parts.streams.copy):
            parts.link.flush(KV)
            gone = parts.streams.module.Event()
            gone.record()
        self._leaving.append(_Leaving(sender, gone))

    def gone(self, has_left: Callable[[Any], bool]) -> list[Request]:
        """Requests that may give back their KV; ``has_left`` is asked with the event behind which all of it is sent."""
        gone = [leaving for leaving in self._leaving if has_left(leaving.gone)]
        self._leaving = [leaving for leaving in self._leaving if leaving not in gone]
        return [leaving.sender.req for leaving in gone]

    def close(self) -> None:
        """The workload is over: what was said too late belongs to nobody."""
        self._early.clear()

    @property
    def _place(self) -> RankLayout:
        return self._parts.place

    def _send(self, sender: _Sender, stop: int, metadata: Metadata | None) -> None:
        """Positions that have not been sent yet, up to ``stop``."""
        start, req, parts = sender.sent, sender.req, self._parts
        assert req.req_pool_idx is not None
        first = start // parts.cache.page_size
        pages = sender.pages[first : first + len(parts.page_list(req.req_pool_idx, start, stop))]
        row = parts.cache.req_to_token_pool.req_to_token[req.req_pool_idx]
        slots = row[start:stop].to(torch.int64)
        streams = parts.streams
        streams.wait(self._stream, streams.schedule)
        with streams.on(self._stream):
            tensors = parts.port.gather(slots)
            self._tell(req, Chunk(req.id, start, stop, pages, metadata), tensors)
        sender.kept += [slots, *tensors]
        sender.sent = stop

    def _tell(self, req: Request, value: Chunk | Failed, tensors: Any = ()) -> None:
        self._parts.link.send(self._place.decode_of(req.index), KV, value, tensors)
