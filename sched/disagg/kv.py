"""The components that both sides of a transfer share, and the ports that read KV from a pool and write it to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..kernels.transfer import gather_kv, gather_rows, gather_tags, scatter_kv, scatter_rows, scatter_tags
from ..link import Link
from ..memory.cache import PrefixCache
from ..memory.pools import IndexPool, KVPool
from ..model.tags import TagPool
from ..observe import Observer
from ..streams import Streams
from .layout import RankLayout


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
    """The ``KVGateway`` of pools on the device. With values none ``tags`` are sent along with the KV, and so are the
    keys of an ``index``."""

    def __init__(
        self, kv: KVPool, tags: TagPool | None, *others: KVPool, index: IndexPool | None = None
    ) -> None:
        self._pools = (kv, *others)
        self._tags = tags
        self._index = index

    def with_pool(self, kv: KVPool) -> KVPort:
        """This port with the pool of a draft model, which uses the same slots."""
        return KVPort(self._pools[0], self._tags, kv, index=self._index)

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        found = [gather_kv(pool.k_cache, pool.v_cache, slots) for pool in self._pools]
        if self._index is not None:
            found.append(gather_rows(self._index.k_cache, slots))
        if self._tags is not None:
            found.append(gather_tags(self._tags.tags, self._tags.sums, slots))
        return found

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:
        for pool, value in zip(self._pools, values, strict=False):
            scatter_kv(pool.k_cache, pool.v_cache, span.slots, value)
        self.scatter_rest(span, values[len(self._pools) :])

    def scatter_rest(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:
        """Write the index keys and tags, which are on the device even if the KV is not."""
        rest = list(values)
        if self._index is not None:
            scatter_rows(self._index.k_cache, span.slots, rest.pop(0))
        if self._tags is not None:
            scatter_tags(self._tags.tags, self._tags.sums, span.slots, rest.pop(0))


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
