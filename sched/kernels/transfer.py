"""KV between the slots of a pool and the contiguous memory that a link sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .registry import Access, Work, kernel


class _GatherKV(NamedTuple):
    k_cache: Sequence[torch.Tensor]
    v_cache: Sequence[torch.Tensor]
    slots: torch.Tensor

    def meta(self) -> torch.Tensor:
        first, count = self.k_cache[0], self.slots.shape[0]
        return nothing(len(self.k_cache), 2, count, *first.shape[1:], dtype=first.dtype)

    def cost(self) -> Work:
        return Work(nbytes(self.slots) + 2 * _moved(self.k_cache, self.slots), beside=True)

    def footprint(self) -> tuple[Access, ...]:
        caches = (Access(cache, write=False, rows=self.slots) for cache in (*self.k_cache, *self.v_cache))
        return (*reads(self.slots), *caches)


@declared("gather_kv(Tensor[] k_cache, Tensor[] v_cache, Tensor slots) -> Tensor", _GatherKV)
def gather_kv(
    k_cache: Sequence[torch.Tensor], v_cache: Sequence[torch.Tensor], slots: torch.Tensor
) -> torch.Tensor:
    """KV of all layers in ``slots`` [n] int64, as [layers, 2, n, kv_heads, d]; caches are [slots, kv_heads, d]."""
    pairs = zip(k_cache, v_cache, strict=True)
    return torch.stack([torch.stack([k.index_select(0, slots), v.index_select(0, slots)]) for k, v in pairs])


class _ScatterKV(NamedTuple):
    k_cache: Sequence[torch.Tensor]
    v_cache: Sequence[torch.Tensor]
    slots: torch.Tensor
    kv: torch.Tensor

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        return Work(nbytes(self.slots) + 2 * _moved(self.k_cache, self.slots), beside=True)

    def footprint(self) -> tuple[Access, ...]:
        caches = (Access(cache, write=True, rows=self.slots) for cache in (*self.k_cache, *self.v_cache))
        return (*reads(self.slots, self.kv), *caches)


@declared(
    "scatter_kv(Tensor(a!)[] k_cache, Tensor(b!)[] v_cache, Tensor slots, Tensor kv) -> ()",
    _ScatterKV,
)
def scatter_kv(
    k_cache: Sequence[torch.Tensor], v_cache: Sequence[torch.Tensor], slots: torch.Tensor, kv: torch.Tensor
) -> None:
    """The other way round."""
    for layer, caches in enumerate(zip(k_cache, v_cache, strict=True)):
        for part, cache in enumerate(caches):
            cache.index_copy_(0, slots, kv[layer, part])


class _GatherRows(NamedTuple):
    caches: Sequence[torch.Tensor]
    slots: torch.Tensor

    def meta(self) -> torch.Tensor:
        first = self.caches[0]
        return nothing(len(self.caches), self.slots.shape[0], *first.shape[1:], dtype=first.dtype)

    def cost(self) -> Work:
        return Work(nbytes(self.slots) + 2 * nbytes(self.meta()), beside=True)

    def footprint(self) -> tuple[Access, ...]:
        return (
            *reads(self.slots),
            *(Access(cache, write=False, rows=self.slots) for cache in self.caches),
        )


@declared("gather_rows(Tensor[] caches, Tensor slots) -> Tensor", _GatherRows)
def gather_rows(caches: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """Of all layers what lies in ``slots`` [n] int64, as [layers, n, d]; caches are [slots, d]."""
    return torch.stack([cache.index_select(0, slots) for cache in caches])


class _ScatterRows(NamedTuple):
    caches: Sequence[torch.Tensor]
    slots: torch.Tensor
    values: torch.Tensor

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        return Work(nbytes(self.slots) + 2 * nbytes(self.values), beside=True)

    def footprint(self) -> tuple[Access, ...]:
        caches = (Access(cache, write=True, rows=self.slots) for cache in self.caches)
        return (*reads(self.slots, self.values), *caches)


@declared("scatter_rows(Tensor(a!)[] caches, Tensor slots, Tensor values) -> ()", _ScatterRows)
def scatter_rows(caches: Sequence[torch.Tensor], slots: torch.Tensor, values: torch.Tensor) -> None:
    """The other way round."""
    for cache, rows in zip(caches, values, strict=True):
        cache.index_copy_(0, slots, rows)


def _moved(caches: Sequence[torch.Tensor], slots: torch.Tensor) -> int:
    """Bytes of KV, each way."""
    heads, dim = caches[0].shape[1:]
    return 2 * len(caches) * slots.shape[0] * heads * dim * caches[0].element_size()


@kernel(
    "gather_tags(Tensor tags, Tensor sums, Tensor slots) -> Tensor",
    meta=lambda *args: nothing(2, args[2].shape[0], dtype=torch.int64),
    cost=None,
    footprint=lambda tags, sums, slots: (
        *reads(slots),
        *(Access(table, write=False, rows=slots) for table in (tags, sums)),
    ),
    integer=True,
)
def gather_tags(tags: torch.Tensor, sums: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """With values none, what stands for the KV of ``slots`` [n] int64: [2, n] int64."""
    return torch.stack([tags[slots], sums[slots]])


@kernel(
    "scatter_tags(Tensor(a!) tags, Tensor(b!) sums, Tensor slots, Tensor values) -> ()",
    meta=lambda *_: None,
    cost=None,
    footprint=lambda tags, sums, slots, values: (
        *reads(slots, values),
        *(Access(table, write=True, rows=slots) for table in (tags, sums)),
    ),
    integer=True,
)
def scatter_tags(tags: torch.Tensor, sums: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """The other way round."""
    tags[slots], sums[slots] = values[0], values[1]
