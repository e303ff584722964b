"""KV between the slots of a pool and the contiguous memory that a link sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .declare import kernel, meta_tensor, nbytes, reads
from .registry import Access, Work


class _Slots(NamedTuple):
    """Slots of the keys and of the values of all layers."""

    k_cache: Sequence[Tensor]
    v_cache: Sequence[Tensor]
    slots: Tensor

    def work(self) -> Work:
        """The KV in the slots is read and written."""
        heads, dim = self.k_cache[0].shape[1:]
        kv = 2 * len(self.k_cache) * self.slots.shape[0] * heads * dim * self.k_cache[0].element_size()
        return Work(nbytes(self.slots) + 2 * kv, beside=True)

    def accesses(self, *, write: bool) -> tuple[Access, ...]:
        return _rows([*self.k_cache, *self.v_cache], self.slots, write=write)


def _rows(caches: Sequence[Tensor], slots: Tensor, *, write: bool) -> tuple[Access, ...]:
    return tuple(Access(cache, write, rows=slots) for cache in caches)


def _kv_meta(k_cache: Sequence[Tensor], slots: Tensor) -> Tensor:
    first = k_cache[0]
    return meta_tensor(len(k_cache), 2, slots.shape[0], *first.shape[1:], dtype=first.dtype)


@kernel(
    meta=_kv_meta,
    cost=lambda kv_slots: kv_slots.work(),
    footprint=lambda kv_slots: (*reads(kv_slots.slots), *kv_slots.accesses(write=False)),
)
def gather_kv(kv_slots: _Slots) -> Tensor:
    """KV of all layers in ``slots`` [n] int64, as [layers, 2, n, kv_heads, d]; caches are [slots, kv_heads, d]."""
    k_cache, v_cache, slots = kv_slots
    pairs = zip(k_cache, v_cache, strict=True)
    return torch.stack([torch.stack([k.index_select(0, slots), v.index_select(0, slots)]) for k, v in pairs])


@kernel(
    mutates=("k_cache", "v_cache"),
    cost=lambda kv_slots: kv_slots.work(),
    footprint=lambda kv_slots, kv: (*reads(kv_slots.slots, kv), *kv_slots.accesses(write=True)),
)
def scatter_kv(kv_slots: _Slots, kv: Tensor) -> None:
    """Writes what ``gather_kv`` returns to the caches."""
    k_cache, v_cache, slots = kv_slots
    for layer, caches in enumerate(zip(k_cache, v_cache, strict=True)):
        for part, cache in enumerate(caches):
            cache.index_copy_(0, slots, kv[layer, part])


def _rows_meta(caches: Sequence[Tensor], slots: Tensor) -> Tensor:
    first = caches[0]
    return meta_tensor(len(caches), slots.shape[0], *first.shape[1:], dtype=first.dtype)


@kernel(
    meta=_rows_meta,
    cost=lambda caches, slots: Work(nbytes(slots) + 2 * nbytes(_rows_meta(caches, slots)), beside=True),
    footprint=lambda caches, slots: (*reads(slots), *_rows(caches, slots, write=False)),
)
def gather_rows(caches: Sequence[Tensor], slots: Tensor) -> Tensor:
    """Of all layers what lies in ``slots`` [n] int64, as [layers, n, d]; caches are [slots, d]."""
    return torch.stack([cache.index_select(0, slots) for cache in caches])


@kernel(
    mutates=("caches",),
    cost=lambda slots, values: Work(nbytes(slots) + 2 * nbytes(values), beside=True),
    footprint=lambda caches, slots, values: (*reads(slots, values), *_rows(caches, slots, write=True)),
)
def scatter_rows(caches: Sequence[Tensor], slots: Tensor, values: Tensor) -> None:
    """Writes what ``gather_rows`` returns to the caches."""
    for cache, rows in zip(caches, values, strict=True):
        cache.index_copy_(0, slots, rows)


@kernel(
    meta=lambda slots: meta_tensor(2, slots.shape[0]),
    cost=None,
    footprint=lambda tags, sums, slots: (*reads(slots), *_rows((tags, sums), slots, write=False)),
    integer=True,
)
def gather_tags(tags: Tensor, sums: Tensor, slots: Tensor) -> Tensor:
    """With values none, what stands for the KV of ``slots`` [n] int64: [2, n] int64."""
    return torch.stack([tags[slots], sums[slots]])


@kernel(
    mutates=("tags", "sums"),
    cost=None,
    footprint=lambda tags, sums, slots, values: (
        *reads(slots, values),
        *_rows((tags, sums), slots, write=True),
    ),
    integer=True,
)
def scatter_tags(tags: Tensor, sums: Tensor, slots: Tensor, values: Tensor) -> None:
    """Writes what ``gather_tags`` returns to the tags."""
    tags[slots], sums[slots] = values[0], values[1]
