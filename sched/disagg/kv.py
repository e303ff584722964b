"""KV that leaves a pool and comes into one: a gather, and a scatter, per chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ..kernels.transfer import gather_kv, gather_rows, gather_tags, scatter_kv, scatter_rows, scatter_tags
from ..memory.index import IndexPool
from ..memory.kv import KVPool


class Tags(Protocol):
    """Of KV that is not computed: ``tags`` and ``sums`` [slots] int64."""

    tags: torch.Tensor
    sums: torch.Tensor


class PageTableSpan(NamedTuple):
    """Positions from ``start`` on in a row of the page table; ``slots`` [n] int64 are theirs."""

    row: int
    start: int
    slots: torch.Tensor


class KVGateway(Protocol):
    """Where KV leaves and comes in. Everything runs on the current stream."""

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        """What lies in ``slots`` [n] int64, in memory of its own."""

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:
        """Put what ``gather`` gave where it belongs."""


class KVPort:
    """``tags`` with values none: they travel with the KV that they stand for; ``index``: so do an indexer's keys."""

    def __init__(
        self, kv: KVPool, tags: Tags | None, *others: KVPool, index: IndexPool | None = None
    ) -> None:
        self._pools = (kv, *others)
        self._tags = tags
        self._index = index

    def with_pool(self, kv: KVPool) -> KVPort:
        """The same, and what a draft model keeps in the same slots."""
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
        self.scatter_beside(span, values[len(self._pools) :])

    def scatter_beside(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:
        """What goes with KV, and lies on the device wherever that is."""
        rest = list(values)
        if self._index is not None:
            scatter_rows(self._index.k_cache, span.slots, rest.pop(0))
        if self._tags is not None:
            scatter_tags(self._tags.tags, self._tags.sums, span.slots, rest.pop(0))
