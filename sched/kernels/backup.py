"""The KV of all layers, token for token, from the device to pinned host memory and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .declare import kernel, nbytes, reads
from .indexer import ABSENT
from .registry import Access, Work
from .sparse import PADDING
from .swap import token_bytes


class _Sides(NamedTuple):
    """The KV of n tokens in all layers, on the device and on the host."""

    k_cache: Sequence[Tensor]  # [slots, kv_heads, d] for each layer
    v_cache: Sequence[Tensor]
    host: Tensor  # [host slots, layers, 2, kv_heads, d], pinned
    slots: Tensor  # [n] int64, ABSENT for a token that is left out
    host_slots: Tensor  # [n] int64

    def cost(self, tokens: int) -> Work:
        moved = tokens * token_bytes(self.k_cache[0]) * len(self.k_cache)
        return Work(nbytes(self.slots, self.host_slots) + moved, host_bytes=moved, beside=True)

    def footprint(self, *, to_host: bool) -> tuple[Access, ...]:
        kept = self.slots > ABSENT
        device = [Access(c, write=not to_host, rows=self.slots[kept]) for c in (*self.k_cache, *self.v_cache)]
        host = Access(self.host, write=to_host, rows=self.host_slots[kept])
        return (*reads(self.slots, self.host_slots), *((*device, host) if to_host else (host, *device)))


@kernel(
    mutates=("host",),
    cost=lambda sides: sides.cost(int((sides.slots > ABSENT).sum())),
    footprint=lambda sides: sides.footprint(to_host=True),
    fixed_cost=False,
    triton="swap",
)
def back_up(sides: _Sides) -> None:
    """Copies the KV from the device to the host. What an ABSENT slot holds goes to the host's padding."""
    k_cache, v_cache, host, slots, host_slots = sides
    source = slots.clamp(min=0)
    target = host_slots.where(slots > ABSENT, PADDING).to(host.device)
    for layer, caches in enumerate(zip(k_cache, v_cache, strict=True)):
        for part, cache in enumerate(caches):
            host[:, layer, part].index_copy_(0, target, cache.index_select(0, source).to(host.device))


@kernel(
    mutates=("k_cache", "v_cache"),
    cost=lambda sides: sides.cost(sides.slots.shape[0]),
    footprint=lambda sides: sides.footprint(to_host=False),
)
def preload(sides: _Sides) -> None:
    """Copies the KV of tokens, none of them ABSENT, from the host to the device."""
    k_cache, v_cache, host, slots, host_slots = sides
    kv = host[host_slots.to(host.device)].to(k_cache[0].device)
    for layer, caches in enumerate(zip(k_cache, v_cache, strict=True)):
        for part, cache in enumerate(caches):
            cache.index_copy_(0, slots, kv[:, layer, part])


@kernel(
    mutates=("host",),
    cost=lambda host_slots, kv: Work(nbytes(host_slots, kv), host_bytes=nbytes(kv), beside=True),
    footprint=lambda host, host_slots, kv: (
        *reads(host_slots, kv),
        Access(host, write=True, rows=host_slots),
    ),
)
def land_on_host(host: Tensor, host_slots: Tensor, kv: Tensor) -> None:
    """Copies ``kv`` [layers, 2, n, kv_heads, d] of the device to ``host_slots`` [n] int64 of pinned memory, which is
    [host slots, layers, 2, kv_heads, d]."""
    host.index_copy_(0, host_slots.to(host.device), kv.permute(2, 0, 1, 3, 4).to(host.device))
