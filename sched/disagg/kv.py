"""The components that both sides of a transfer share, the ports that read KV from a pool and write it to one, and a
transfer that is never made."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..kernels.transfer import gather_kv, gather_tags, scatter_kv, scatter_tags
from ..link import Link, Message
from ..memory.cache import PrefixCache
from ..memory.pools import KVPool
from ..model.tags import TagPool
from ..observe import Observer
from ..streams import Streams
from .layout import HANDSHAKE, KV, REQUEST, Chunk, Metadata, Preallocated, RankLayout


class PageTableSpan(NamedTuple):
    """The positions from ``start`` on in a row of the page table, with their ``slots`` [n] int64."""

    row: int
    start: int
    slots: torch.Tensor


class KVGateway(Protocol):
    """Reads KV that is sent and writes KV that is received. Everything runs on the current stream."""

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        """The contents of ``slots`` [n] int64, in memory of their own."""

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:
        """Write what ``gather`` has returned to ``span``."""


class KVPort:
    """The ``KVGateway`` of the ``caches`` [slots, ...] of each pool on the device: those of the KV, then those of an
    index. With values none ``tags`` are sent along. Without caches it reads and writes nothing."""

    def __init__(self, tags: TagPool | None, *caches: Sequence[torch.Tensor]) -> None:
        self._tags = tags
        self._caches = caches

    def with_pool(self, draft: KVPool) -> KVPort:
        """This port with the pool of a draft model, which uses the same slots."""
        kv, *index = self._caches
        return KVPort(self._tags, kv, draft.caches, *index)

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        found = [gather_kv(caches, slots) for caches in self._caches]
        if self._tags is not None:
            found.append(gather_tags(self._tags.tags, self._tags.sums, slots))
        return found

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor], *, first: int = 0) -> None:
        """As ``KVGateway.scatter``; ``values`` are those of the caches from the ``first`` one on."""
        for caches, value in zip(self._caches[first:], values, strict=False):
            scatter_kv(caches, span.slots, value)
        if self._tags is not None:
            scatter_tags(self._tags.tags, self._tags.sums, span.slots, values[-1])


@dataclass(frozen=True, slots=True)
class DisaggComponents:
    layout: RankLayout
    link: Link
    port: KVGateway
    cache: PrefixCache
    streams: Streams

    def page_list(self, row: int, start: int, stop: int) -> Sequence[int]:
        """Pages of the positions [start, stop) of a row, on the host: a blocking copy, as upstream's. ``start`` is the
        first position of a page."""
        size = self.cache.page_size
        slots = self.cache.req_to_token_pool.req_to_token[row, start:stop].cpu()
        pages: list[int] = (slots[::size] // size).tolist()
        return pages

    def transfer_stream(self, observer: Observer) -> Any:
        stream = self.streams.module.Stream()
        observer.stream("transfer", stream)
        return stream


class FakeLink:
    """A worker's link of which only the connections to the router are real (upstream's ``fake`` backend): each worker
    runs as if the other were infinitely fast. The messages that the other worker would send are available at once.

    A decode worker then reads whatever its pages contain, and its first token is 0: tokens have no meaning.
    """

    def __init__(self, link: Link, layout: RankLayout) -> None:
        self.rank, self.size = link.rank, link.size
        self.receive, self.all_to_all, self.gone = link.receive, link.all_to_all, link.gone
        self._link = link
        self._layout = layout
        self._answers: dict[str, deque[Any]] = {HANDSHAKE: deque(), KV: deque()}

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        if tag not in self._answers:
            self._link.send(to, tag, value, tensors)
        elif isinstance(value, Preallocated):
            self._answers[KV].append(Chunk(value.id, 0, 0, (), Metadata(0, (), 0, None, None)))

    def flush(self, tag: str) -> None:
        if tag not in self._answers:
            self._link.flush(tag)

    def poll(self, tag: str) -> Message | None:
        answers = self._answers.get(tag)
        if answers is not None:
            return Message(self.rank, answers.popleft(), ()) if answers else None
        message = self._link.poll(tag)
        prefills = tag == REQUEST and self._layout.role == "prefill"
        if prefills and message is not None and message.value is not None:
            self._answers[HANDSHAKE].append(Preallocated(message.value.id, ()))
        return message

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        if not any(self._answers.get(tag) for tag in tags):
            self._link.wait([tag for tag in tags if tag not in self._answers], until)
