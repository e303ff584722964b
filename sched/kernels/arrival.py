"""KV of another worker on its way into the host's memory, and the hot buffer of whoever it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .declare import declared, nbytes, reads
from .registry import Access, Work

NOWHERE = (1 << 31) - 1  # a position that no request has


class _LandOnHost(NamedTuple):
    host: torch.Tensor
    host_slots: torch.Tensor
    kv: torch.Tensor

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        moved = nbytes(self.kv)
        return Work(nbytes(self.host_slots) + moved, host_bytes=moved, beside=True)

    def footprint(self) -> tuple[Access, ...]:
        written = Access(self.host, write=True, rows=self.host_slots)
        return (*reads(self.host_slots, self.kv), written)


@declared("land_on_host(Tensor(a!) host, Tensor host_slots, Tensor kv) -> ()", _LandOnHost)
def land_on_host(host: torch.Tensor, host_slots: torch.Tensor, kv: torch.Tensor) -> None:
    """``kv`` [layers, 2, n, kv_heads, d] of the device to ``host_slots`` [n] int64 of pinned memory, which is
    [host slots, layers, 2, kv_heads, d]."""
    host.index_copy_(0, host_slots.to(host.device), kv.permute(2, 0, 1, 3, 4).to(host.device))


class _EmptyBuffer(NamedTuple):
    tokens: Sequence[torch.Tensor]
    row: int

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        return Work(nbytes(*(table[self.row] for table in self.tokens)))

    def footprint(self) -> tuple[Access, ...]:
        row = torch.tensor([self.row])
        return tuple(Access(table, write=True, rows=row) for table in self.tokens)


@declared("empty_buffer(Tensor(a!)[] tokens, int row) -> ()", _EmptyBuffer, integer=True)
def empty_buffer(tokens: Sequence[torch.Tensor], row: int) -> None:
    """The hot buffer of a ``row`` holds nothing that is known, in any layer; ``tokens`` are [rows, B] int32 each."""
    for table in tokens:
        table[row].fill_(NOWHERE)
