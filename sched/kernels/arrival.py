"""Receiving KV from another worker into the host's memory, and emptying the hot buffer of its request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .declare import kernel, nbytes, reads
from .registry import Access, Work

NOWHERE = (1 << 31) - 1  # a position that no request has


def _land_cost(host_slots: Tensor, kv: Tensor) -> Work:
    return Work(nbytes(host_slots, kv), host_bytes=nbytes(kv), beside=True)


@kernel(
    mutates=("host",),
    cost=_land_cost,
    footprint=lambda host, host_slots, kv: (
        *reads(host_slots, kv),
        Access(host, write=True, rows=host_slots),
    ),
)
def land_on_host(host: Tensor, host_slots: Tensor, kv: Tensor) -> None:
    """Copies ``kv`` [layers, 2, n, kv_heads, d] of the device to ``host_slots`` [n] int64 of pinned memory, which is
    [host slots, layers, 2, kv_heads, d]."""
    host.index_copy_(0, host_slots.to(host.device), kv.permute(2, 0, 1, 3, 4).to(host.device))


def _empty_footprint(tokens: Sequence[Tensor], row: int) -> tuple[Access, ...]:
    rows = torch.tensor([row])
    return tuple(Access(table, write=True, rows=rows) for table in tokens)


@kernel(
    mutates=("tokens",),
    cost=lambda tokens, row: Work(nbytes(*(table[row] for table in tokens))),
    footprint=_empty_footprint,
    integer=True,
)
def empty_buffer(tokens: Sequence[Tensor], row: int) -> None:
    """Marks all slots of the hot buffer of a ``row`` as empty, in every layer; ``tokens`` are [rows, B] int32 each."""
    for table in tokens:
        table[row].fill_(NOWHERE)
