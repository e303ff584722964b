"""KV between the slots of a pool and the contiguous memory that a link sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .declare import Work, Written, kernel, meta_tensor, nbytes


def _kv_meta(caches: Sequence[Tensor], slots: Tensor) -> Tensor:
    first = caches[0]
    return meta_tensor(len(caches), slots.shape[0], *first.shape[1:], dtype=first.dtype)


@kernel(
    meta=_kv_meta,
    cost=lambda caches, slots: Work(nbytes(slots) + 2 * nbytes(_kv_meta(caches, slots)), beside=True),
    rows={"caches": "slots"},
)
def gather_kv(caches: Sequence[Tensor], slots: Tensor) -> Tensor:
    """What all caches [slots, ...] of a pool hold in ``slots`` [n] int64, as [caches, n, ...]."""
    return torch.stack([cache.index_select(0, slots) for cache in caches])


@kernel(
    cost=lambda slots, kv: Work(nbytes(slots) + 2 * nbytes(kv), beside=True),
    rows={"caches": "slots"},
)
def scatter_kv(caches: Sequence[Written], slots: Tensor, kv: Tensor) -> None:
    """Writes what ``gather_kv`` returns to the caches."""
    for cache, rows in zip(caches, kv, strict=True):
        cache.index_copy_(0, slots, rows)


@kernel(meta=lambda slots: meta_tensor(2, slots.shape[0]), cost=None)
def gather_tags(tags: Tensor, sums: Tensor, slots: Tensor) -> Tensor:
    """With values none, what stands for the KV of ``slots`` [n] int64: [2, n] int64."""
    return torch.stack([tags[slots], sums[slots]])


@kernel(cost=None)
def scatter_tags(tags: Written, sums: Written, slots: Tensor, values: Tensor) -> None:
    """Writes what ``gather_tags`` returns to the tags."""
    tags[slots], sums[slots] = values[0], values[1]
