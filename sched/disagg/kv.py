"""KV that leaves a pool and comes into one: a gather, and a scatter, per chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..kernels.transfer import gather_kv, gather_tags, scatter_kv, scatter_tags
from ..memory.kv import KVPool


class Tags(Protocol):
    """Of KV that is not computed: ``tags`` and ``sums`` [slots] int64."""

    tags: torch.Tensor
    sums: torch.Tensor


class Port(Protocol):
    """Where KV leaves and comes in. Everything runs on the current stream."""

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        """What lies in ``slots`` [n] int64, in memory of its own."""

    def scatter(self, slots: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Put what ``gather`` gave into ``slots`` [n] int64."""


class KVPort:
    """``tags`` with values none: they travel with the KV that they stand for."""

    def __init__(self, kv: KVPool, tags: Tags | None, *others: KVPool) -> None:
        self._pools = (kv, *others)
        self._tags = tags

    def with_pool(self, kv: KVPool) -> KVPort:
        """The same, and what a draft model keeps in the same slots."""
        return KVPort(self._pools[0], self._tags, kv)

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        kv = [gather_kv(pool.k_cache, pool.v_cache, slots) for pool in self._pools]
        if self._tags is None:
            return kv
        return *kv, gather_tags(self._tags.tags, self._tags.sums, slots)

    def scatter(self, slots: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        for pool, value in zip(self._pools, values, strict=False):
            scatter_kv(pool.k_cache, pool.v_cache, slots, value)
        if self._tags is not None:
            scatter_tags(self._tags.tags, self._tags.sums, slots, values[-1])
