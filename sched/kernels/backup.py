"""The KV of all layers, token for token, from the device to pinned host memory and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from .declare import declared, nbytes, reads
from .indexer import ABSENT
from .registry import Access, Work
from .sparse import PADDING
from .swap import token_bytes


class _AllLayers(NamedTuple):
    """``to_host``: whether the host's side is the one that is written. Nothing that comes back is ABSENT."""

    k_cache: Sequence[torch.Tensor]
    v_cache: Sequence[torch.Tensor]
    host: torch.Tensor
    slots: torch.Tensor
    host_slots: torch.Tensor
    to_host: bool

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        tokens = int((self.slots > ABSENT).sum()) if self.to_host else self.slots.shape[0]
        moved = tokens * token_bytes(self.k_cache[0]) * len(self.k_cache)
        return Work(nbytes(self.slots, self.host_slots) + moved, host_bytes=moved, beside=True)

    def footprint(self) -> tuple[Access, ...]:
        kept, to_host = self.slots > ABSENT, self.to_host
        device = [Access(c, write=not to_host, rows=self.slots[kept]) for c in (*self.k_cache, *self.v_cache)]
        host = Access(self.host, write=to_host, rows=self.host_slots[kept])
        moved = (*device, host) if to_host else (host, *device)
        return (*reads(self.slots, self.host_slots), *moved)


@declared(
    "back_up(Tensor[] k_cache, Tensor[] v_cache, Tensor(a!) host, Tensor slots, Tensor host_slots) -> ()",
    partial(_AllLayers, to_host=True),
    fixed_cost=False,
    triton="swap",
)
def back_up(
    k_cache: Sequence[torch.Tensor],
    v_cache: Sequence[torch.Tensor],
    host: torch.Tensor,
    slots: torch.Tensor,
    host_slots: torch.Tensor,
) -> None:
    """Copies the KV of all layers from device ``slots`` [n] int64 to ``host_slots`` [n] int64 of pinned memory.

    Caches are one [slots, kv_heads, d] per layer, ``host`` is [host slots, layers, 2, kv_heads, d]. A slot that is
    ABSENT is left out: what it holds goes to the host's padding.
    """
    source = slots.clamp(min=0)
    target = host_slots.where(slots > ABSENT, PADDING).to(host.device)
    for layer, caches in enumerate(zip(k_cache, v_cache, strict=True)):
        for part, cache in enumerate(caches):
            host[:, layer, part].index_copy_(0, target, cache.index_select(0, source).to(host.device))


@declared(
    "preload(Tensor(a!)[] k_cache, Tensor(b!)[] v_cache, Tensor host, Tensor slots, Tensor host_slots) -> ()",
    partial(_AllLayers, to_host=False),
)
def preload(
    k_cache: Sequence[torch.Tensor],
    v_cache: Sequence[torch.Tensor],
    host: torch.Tensor,
    slots: torch.Tensor,
    host_slots: torch.Tensor,
) -> None:
    """The way back, of tokens that are all there."""
    kv = host[host_slots.to(host.device)].to(k_cache[0].device)
    for layer, caches in enumerate(zip(k_cache, v_cache, strict=True)):
        for part, cache in enumerate(caches):
            cache.index_copy_(0, slots, kv[:, layer, part])
