"""KV between a request's hot buffer on the device and its full copy in pinned host memory.

A long request's hot buffer holds B tokens and, in slot B, its newest one::

    slot       0  1  2  ...                    B - 1 | B
    token      any cached ones, by tokens[slot]      | the newest

A short one, of at most B tokens, has token p in slot p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .declare import kernel, meta_tensor, nbytes, reads
from .indexer import ABSENT
from .registry import Access, Work
from .sparse import PADDING


class SwapPlan(NamedTuple):
    """The slots of a decode's chosen tokens once the missing ones have been fetched."""

    locations: Tensor  # [b, k] int32, device slots; padding where a position is absent
    missing: Tensor  # [b, k] int32, positions to fetch, ABSENT where there is none
    targets: Tensor  # [b, k] int32, the device slots they go to; padding where there is none


class Lookup(NamedTuple):
    """The chosen positions of b requests, and the hot buffers that they are looked up in."""

    positions: Tensor  # [b, k] int32, ascending, ABSENT behind them
    req_pool_indices: Tensor  # [b]
    seq_lens: Tensor  # [b], the newest token included
    device_buffer: Tensor  # [rows, B + page] int64, the device slots of each buffer
    tokens: Tensor  # [rows, B] int32, the positions that they hold
    lru: Tensor  # [rows, B] int16, their order, the least recently used in front
    lookups: Tensor  # [2] int64, counts the tokens looked up for long requests, and those not found
    max_seq_len: int


def _plan_meta(positions: Tensor) -> tuple[Tensor, ...]:
    return tuple(meta_tensor(*positions.shape, dtype=torch.int32) for _ in range(3))


def _plan_cost(lookup: Lookup) -> Work:
    """The whole buffer of each request is searched, and its order is rewritten."""
    per_row = lookup.tokens.shape[1] * (lookup.tokens.element_size() + 2 * lookup.lru.element_size())
    lens = nbytes(lookup.req_pool_indices, lookup.seq_lens)
    return Work(lookup.req_pool_indices.shape[0] * per_row + 8 * nbytes(lookup.positions) + lens)


def _plan_footprint(lookup: Lookup) -> tuple[Access, ...]:
    positions, rows, seq_lens, device_buffer, tokens, lru, lookups, _ = lookup
    held = seq_lens.clamp(max=lru.shape[1] + 1)
    return (
        *reads(positions, rows, seq_lens),
        Access(device_buffer, write=False, rows=rows, lens=held),
        *(Access(table, write, rows) for table in (tokens, lru) for write in (False, True)),
        Access(lookups, write=True),
    )


@kernel(
    mutates=("tokens", "lru", "lookups"),
    meta=_plan_meta,
    cost=_plan_cost,
    footprint=_plan_footprint,
    integer=True,
    triton="swap",
)
def plan_swap_in(lookup: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    """A ``SwapPlan`` for the chosen positions.

    The i-th missing token takes the i-th slot in the buffer's order that no chosen position is in. Afterwards the order
    is: slots not used, slots just filled, slots that were hit.
    """
    positions, rows, seq_lens, device_buffer, tokens, lru, lookups, max_seq_len = lookup
    size = lru.shape[1]
    present = positions > ABSENT
    where, newest = positions.clamp(min=0).to(torch.int64), (seq_lens - 1).unsqueeze(1)
    look = present & (seq_lens > size).unsqueeze(1) & (where != newest)
    held = _slots_of(where, tokens[rows], _width(seq_lens, max_seq_len))
    hit, miss = look & (held > ABSENT), look & (held == ABSENT)
    filled, order = _turned(lru[rows].to(torch.int64), held.where(hit, size), miss)
    found = held.where(hit, filled.where(miss, where.clamp(max=size)))
    locations = device_buffer[rows.unsqueeze(1), found].where(present, PADDING).to(torch.int32)
    missing = positions.where(miss, ABSENT)
    tokens[rows] = _written(tokens[rows], filled.where(miss, size), missing)
    lru[rows] = order.to(lru.dtype)
    lookups += torch.stack([look.sum(), miss.sum()])
    return locations, missing, locations.where(miss, PADDING)


@kernel(
    mutates=("tokens", "lru", "lookups"),
    meta=_plan_meta,
    cost=_plan_cost,
    footprint=_plan_footprint,
    integer=True,
)
def plan_unseen(lookup: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    """Costs as much as ``plan_swap_in`` and does nothing: for layers that choose the same positions as the first one,
    whose plan stands for all. Used only where floats are skipped."""
    unused = torch.zeros_like(lookup.positions)
    return unused, unused.clone(), unused.clone()


def _width(seq_lens: Tensor, bound: int) -> int:
    return int(seq_lens.max()) if seq_lens.device.type == "cpu" else bound


def _slots_of(where: Tensor, tokens: Tensor, width: int) -> Tensor:
    """The buffer slot [b, k] int64 that holds each position, or ABSENT.

    Where ``width``, a bound on the lengths, is below the buffer's size no request is long and the result is not used.
    """
    table = torch.full((where.shape[0], width), ABSENT, dtype=torch.int16, device=where.device)
    slots = torch.arange(tokens.shape[1], dtype=torch.int16, device=where.device).expand_as(tokens)
    table.scatter_(1, tokens.to(torch.int64).clamp(max=width - 1), slots)
    return table.gather(1, where.clamp(max=width - 1)).to(torch.int64)


def _turned(order: Tensor, hit: Tensor, miss: Tensor) -> tuple[Tensor, Tensor]:
    """The slot [b, k] for each missing token, and the buffer's ``order`` [b, B] afterwards. ``hit`` [b, k] are the
    slots that were hit, B where none was."""
    b, size = order.shape
    flags = torch.zeros(b, size + 1, dtype=torch.bool, device=order.device).scatter_(1, hit, value=True)
    used = flags.gather(1, order)  # in the buffer's order, as all that follows
    free = (~used).cumsum(1) - 1
    by_rank = torch.zeros(b, size + 1, dtype=torch.int64, device=order.device)
    by_rank.scatter_(1, free.where(~used, size), order)
    filled = by_rank.gather(1, (miss.cumsum(1) - 1).clamp(min=0))
    misses = miss.sum(1, keepdim=True)
    stale = size - used.sum(1, keepdim=True) - misses
    unused = torch.where(free < misses, stale + free, free - misses)
    place = torch.where(used, stale + misses + used.cumsum(1) - 1, unused)
    return filled, torch.empty_like(order).scatter_(1, place, order)


def _written(tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Buffers [b, B] with ``positions`` [b, k] in ``slots`` [b, k]; what goes to slot B is left out."""
    padded = torch.cat([tokens, tokens[:, :1]], dim=1)
    return padded.scatter_(1, slots, positions)[:, :-1]


def token_bytes(cache: Tensor) -> int:
    """Bytes of one token's keys and values in one layer; ``cache`` [slots, kv_heads, d] is either cache."""
    return 2 * cache.shape[1] * cache.shape[2] * cache.element_size()


class Fetch(NamedTuple):
    """One layer's KV of the missing positions of b requests, on its way from pinned memory to the device."""

    k_cache: Tensor  # [slots, kv_heads, d]
    v_cache: Tensor  # [slots, kv_heads, d]
    host: Tensor  # [host slots, 2, kv_heads, d], the layer's part of the host pool
    host_slots: Tensor  # [rows, context] int64, where in it each position lies
    req_pool_indices: Tensor  # [b]
    missing: Tensor  # [b, k] int32
    targets: Tensor  # [b, k] int32, the device slots


def _swap_cost(k_cache: Tensor, missing: Tensor, targets: Tensor) -> Work:
    fetched = int((missing > ABSENT).sum()) * token_bytes(k_cache)
    return Work(nbytes(missing, targets) + fetched, host_bytes=fetched)


def _swap_footprint(fetch: Fetch) -> tuple[Access, ...]:
    k_cache, v_cache, host, host_slots, rows, missing, targets = fetch
    fetched = missing > ABSENT
    request, _ = fetched.nonzero(as_tuple=True)
    sources, slots = host_slots[rows[request], missing[fetched]], targets[fetched]
    return (
        *reads(rows, missing, targets),
        Access(host_slots, write=False, rows=rows, lens=missing.amax(1) + 1),
        Access(host, write=False, rows=sources),
        Access(k_cache, write=True, rows=slots),
        Access(v_cache, write=True, rows=slots),
    )


@kernel(
    mutates=("k_cache", "v_cache"),
    cost=_swap_cost,
    footprint=_swap_footprint,
    fixed_cost=False,
    triton="swap",
    strided=("host",),
)
def swap_in(fetch: Fetch) -> None:
    """Gathers the missing positions' KV from pinned memory. Absent positions write to the padding slot."""
    k_cache, v_cache, host, host_slots, req_pool_indices, missing, targets = fetch
    rows = host_slots[req_pool_indices.unsqueeze(1), missing.clamp(min=0)].where(missing > ABSENT, PADDING)
    kv = host[rows.flatten().to(host.device)].to(k_cache.device)
    slots = targets.flatten().to(torch.int64)
    k_cache.index_copy_(0, slots, kv[:, 0])
    v_cache.index_copy_(0, slots, kv[:, 1])
