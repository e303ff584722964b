"""KV between a request's hot buffer on the device and its full copy in pinned host memory, and the bookkeeping of hot
buffers: from slots of the page table to slots of KV on the device.

A long request's hot buffer holds B tokens and, in slot B, its newest one::

    slot       0  1  2  ...                    B - 1 | B
    token      any cached ones, by tokens[slot]      | the newest

A short one, of at most B tokens, has token p in slot p. The page table's slots are logical: ``mapping`` [logical slots]
int64 says where on the device the KV of a logical slot is, 0 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .declare import INT64, Access, Work, Written, kernel, meta_tensor, meta_tensors, nbytes, reads
from .sparse import ABSENT, PADDING, entries_at
from .transfer import scatter_kv


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
    tokens: Written  # [rows, B] int32, the positions that they hold
    lru: Written  # [rows, B] int16, their order, the least recently used in front
    lookups: Written  # [2] int64, counts the tokens looked up for long requests, and those not found
    max_seq_len: int


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
    meta=lambda positions: meta_tensors(3, *positions.shape, dtype=torch.int32),
    cost=_plan_cost,
    footprint=_plan_footprint,
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
    longest = int(seq_lens.max()) if seq_lens.device.type == "cpu" else max_seq_len
    held = slots_of(where, tokens[rows], longest)
    hit, miss = look & (held > ABSENT), look & (held == ABSENT)
    filled, order = turned(lru[rows].to(torch.int64), held.where(hit, size), miss)
    found = held.where(hit, filled.where(miss, where.clamp(max=size)))
    locations = device_buffer[rows.unsqueeze(1), found].where(present, PADDING).to(torch.int32)
    missing = positions.where(miss, ABSENT)
    padded = torch.cat(
        [tokens[rows], tokens[rows, :1]], dim=1
    )  # by a slot B for positions that are not missing
    tokens[rows] = padded.scatter_(1, filled.where(miss, size), missing)[:, :-1]
    lru[rows] = order.to(lru.dtype)
    lookups += torch.stack([look.sum(), miss.sum()])
    return locations, missing, locations.where(miss, PADDING)


@kernel(
    meta=lambda positions: meta_tensors(3, *positions.shape, dtype=torch.int32),
    cost=_plan_cost,
    footprint=_plan_footprint,
)
def plan_unseen(lookup: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    """Costs as much as ``plan_swap_in`` and does nothing: for layers that choose the same positions as the first one,
    whose plan stands for all. Used only where floats are skipped."""
    unused = torch.zeros_like(lookup.positions)
    return unused, unused.clone(), unused.clone()


def slots_of(where: Tensor, tokens: Tensor, width: int) -> Tensor:
    """The buffer slot [b, k] int64 that holds each position, or ABSENT.

    Where ``width``, a bound on the lengths, is below the buffer's size no request is long and the result is not used.
    """
    table = torch.full((where.shape[0], width), ABSENT, dtype=torch.int16, device=where.device)
    slots = torch.arange(tokens.shape[1], dtype=torch.int16, device=where.device).expand_as(tokens)
    table.scatter_(1, tokens.to(torch.int64).clamp(max=width - 1), slots)
    return table.gather(1, where.clamp(max=width - 1)).to(torch.int64)


def turned(order: Tensor, hit: Tensor, miss: Tensor) -> tuple[Tensor, Tensor]:
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


def token_bytes(cache: Tensor) -> int:
    """Bytes of one token's keys and values in one layer; ``cache`` [slots, kv_heads, d] is either cache."""
    return 2 * cache.shape[1] * cache.shape[2] * cache.element_size()


class Fetch(NamedTuple):
    """One layer's KV of the missing positions of b requests, on its way from pinned memory to the device."""

    k_cache: Written  # [slots, kv_heads, d]
    v_cache: Written  # [slots, kv_heads, d]
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
    cost=_swap_cost,
    footprint=_swap_footprint,
    fixed_cost=False,
    strided=("host",),
)
def swap_in(fetch: Fetch) -> None:
    """Gathers the missing positions' KV from pinned memory. Absent positions write to the padding slot."""
    k_cache, v_cache, host, host_slots, req_pool_indices, missing, targets = fetch
    rows = entries_at(host_slots, req_pool_indices, missing)
    kv = host[rows.flatten().to(host.device)].to(k_cache.device)
    slots = targets.flatten().to(torch.int64)
    k_cache.index_copy_(0, slots, kv[:, 0])
    v_cache.index_copy_(0, slots, kv[:, 1])


def _moved(k_cache: Sequence[Tensor], slots: Tensor, host_slots: Tensor, tokens: int) -> Work:
    moved = tokens * token_bytes(k_cache[0]) * len(k_cache)
    return Work(nbytes(slots, host_slots) + moved, host_bytes=moved, beside=True)


def _backup_footprint(
    k_cache: Sequence[Tensor], v_cache: Sequence[Tensor], host: Tensor, slots: Tensor, host_slots: Tensor
) -> tuple[Access, ...]:
    kept = slots > ABSENT
    return (
        *reads(slots, host_slots),
        *(Access(cache, write=False, rows=slots[kept]) for cache in (*k_cache, *v_cache)),
        Access(host, write=True, rows=host_slots[kept]),
    )


@kernel(
    cost=lambda k_cache, slots, host_slots: _moved(k_cache, slots, host_slots, int((slots > ABSENT).sum())),
    footprint=_backup_footprint,
    fixed_cost=False,
)
def back_up(
    k_cache: Sequence[Tensor], v_cache: Sequence[Tensor], host: Written, slots: Tensor, host_slots: Tensor
) -> None:
    """Copies the KV of n tokens in all layers from the device's ``slots`` [n] int64 to ``host_slots`` [n] int64. The
    caches are [slots, kv_heads, d] for each layer, ``host`` is [host slots, layers, 2, kv_heads, d], pinned. What an
    ABSENT slot holds goes to the host's padding."""
    source = slots.clamp(min=0)
    target = host_slots.where(slots > ABSENT, PADDING).to(host.device)
    for layer, caches in enumerate(zip(k_cache, v_cache, strict=True)):
        for part, cache in enumerate(caches):
            host[:, layer, part].index_copy_(0, target, cache.index_select(0, source).to(host.device))


@kernel(
    cost=lambda k_cache, slots, host_slots: _moved(k_cache, slots, host_slots, slots.shape[0]),
    rows={"k_cache": "slots", "v_cache": "slots", "host": "host_slots"},
)
def preload(
    k_cache: Sequence[Written], v_cache: Sequence[Written], host: Tensor, slots: Tensor, host_slots: Tensor
) -> None:
    """Copies the KV of tokens, none of them ABSENT, from the host to the device, as ``back_up`` does in the other
    direction."""
    kv = host[host_slots.to(host.device)].to(k_cache[0].device)
    scatter_kv([*k_cache, *v_cache], slots, kv.permute(2, 1, 0, 3, 4).flatten(0, 1))


@kernel(
    cost=lambda host_slots, kv: Work(nbytes(host_slots, kv), host_bytes=nbytes(kv), beside=True),
    rows={"host": "host_slots"},
)
def land_on_host(host: Written, host_slots: Tensor, kv: Tensor) -> None:
    """Copies ``kv`` [2 · layers, n, kv_heads, d] of the device, keys first, to ``host_slots`` [n] int64 of pinned
    memory, which is [host slots, layers, 2, kv_heads, d]."""
    by_token = kv.unflatten(0, (2, -1)).permute(2, 1, 0, 3, 4)
    host.index_copy_(0, host_slots.to(host.device), by_token.to(host.device))


NOWHERE = (1 << 31) - 1  # a position that no request has


@kernel(
    cost=lambda out_cache_loc, page_size: Work(
        2 * nbytes(out_cache_loc) + INT64 * out_cache_loc.shape[0] // page_size
    ),
    rows={"mapping": "out_cache_loc"},
)
def map_prompt(mapping: Written, out_cache_loc: Tensor, free_pages: Tensor, page_size: int) -> None:
    """Gives each new logical slot [T] a device slot, in pages from the front of ``free_pages``.

    A request's new slots start at a page boundary: its only cached prefix is its own chunks, and those are whole pages.
    """
    offset = out_cache_loc % page_size
    page = (offset == 0).cumsum(0) - 1
    mapping[out_cache_loc] = free_pages[page] * page_size + offset


@kernel(
    meta=lambda slots: meta_tensor(slots.shape[0]),
    cost=lambda slots: Work(3 * nbytes(slots)),
    rows={"mapping": "slots"},
)
def translate(mapping: Tensor, slots: Tensor) -> Tensor:
    """Device slots [n] int64 of logical ``slots`` [n]."""
    return mapping[slots.to(torch.int64)]


@kernel(
    meta=lambda slots, page_size: meta_tensor(-(-slots.shape[0] // page_size) * page_size),
    cost=lambda slots: Work(nbytes(slots) + 3 * INT64 * slots.shape[0]),
    rows={"mapping": "slots"},
)
def unmap(mapping: Written, slots: Tensor, page_size: int) -> Tensor:
    """Clears the mapping of a request's logical ``slots`` [n] int32 and returns their device slots, including the rest
    of the last page: [n rounded up to pages] int64."""
    logical = slots.to(torch.int64)
    pages = mapping[logical[::page_size]].unsqueeze(1) + torch.arange(page_size, device=mapping.device)
    mapping[logical] = 0
    return pages.flatten()


class NewestTokens(NamedTuple):
    """The new tokens of b requests, and the hot buffers that they belong to."""

    mapping: Written
    out_cache_loc: Tensor  # [b], their logical slots
    device_buffer: Tensor  # [rows, size + page]
    req_pool_indices: Tensor  # [b]
    seq_lens: Tensor  # [b], the new tokens included
    size: int


def _newest_footprint(newest: NewestTokens) -> tuple[Access, ...]:
    mapping, out_cache_loc, device_buffer, rows, seq_lens, size = newest
    return (
        Access(mapping, write=True, rows=out_cache_loc),
        *reads(out_cache_loc, rows, seq_lens),
        Access(device_buffer, write=False, rows=rows, lens=seq_lens.clamp(min=0, max=size + 1)),
    )


@kernel(
    cost=lambda out_cache_loc, req_pool_indices, seq_lens: Work(
        nbytes(out_cache_loc, req_pool_indices, seq_lens) + 2 * INT64 * seq_lens.shape[0]
    ),
    footprint=_newest_footprint,
)
def map_newest(newest: NewestTokens) -> None:
    """Maps each logical slot to its slot in the request's buffer: the token's position, at most ``size``."""
    mapping, out_cache_loc, device_buffer, rows, seq_lens, size = newest
    mapping[out_cache_loc] = device_buffer[rows, (seq_lens - 1).clamp(max=size)]


class PreviousTokens(NamedTuple):
    """Where the tokens before the new ones of b requests are found."""

    device_buffer: Tensor  # [rows, size + page]
    host_slots: Tensor  # [rows, context + page]
    staged_lens: Tensor  # [rows], how many positions were staged with the prompt
    req_pool_indices: Tensor  # [b]
    seq_lens: Tensor  # [b], the new tokens included
    size: int


def _previous_footprint(previous: PreviousTokens) -> tuple[Access, ...]:
    device_buffer, host_slots, staged_lens, rows, seq_lens, size = previous
    held = (seq_lens - 1).clamp(min=0)
    return (
        *reads(rows, seq_lens),
        Access(staged_lens, write=False, rows=rows),
        Access(device_buffer, write=False, rows=rows, lens=held.clamp(max=size + 1)),
        Access(host_slots, write=False, rows=rows, lens=held),
    )


@kernel(
    meta=lambda seq_lens: meta_tensors(2, seq_lens.shape[0]),
    cost=lambda req_pool_indices, seq_lens: Work(
        nbytes(req_pool_indices, seq_lens) + 5 * INT64 * seq_lens.shape[0]
    ),
    footprint=_previous_footprint,
)
def previous_tokens(previous: PreviousTokens) -> tuple[Tensor, Tensor]:
    """Returns the device slot and the host slot, [b] int64 each, of the token before each request's new one. The device
    slot is ABSENT for a token that was staged with its prompt."""
    device_buffer, host_slots, staged_lens, rows, seq_lens, size = previous
    position = seq_lens - 2
    slots = device_buffer[rows, position.clamp(max=size)]
    return slots.masked_fill(position < staged_lens[rows], ABSENT), host_slots[rows, position]


@kernel(
    cost=lambda tokens, row: Work(nbytes(*(table[row] for table in tokens))),
    footprint=lambda tokens, row: tuple(
        Access(table, write=True, rows=torch.tensor([row])) for table in tokens
    ),
)
def empty_buffer(tokens: Sequence[Written], row: int) -> None:
    """Marks all slots of the hot buffer of a ``row`` as empty, in every layer; ``tokens`` are [rows, B] int32 each."""
    for table in tokens:
        table[row].fill_(NOWHERE)
