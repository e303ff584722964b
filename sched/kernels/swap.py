"""KV between a request's hot buffer on the device and its full copy in pinned host memory.

A long request's hot buffer holds B tokens and, in slot B, its newest one::

    slot       0  1  2  ...                    B - 1 | B
    token      any cached ones, by tokens[slot]      | the newest

A short one, of at most B tokens, has token p in slot p.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .indexer import ABSENT
from .registry import Access, Work, kernel
from .sparse import PADDING


class SwapPlan(NamedTuple):
    """Where a decode's chosen tokens lie, once those that are missing have come in."""

    locations: torch.Tensor  # [b, k] int32, device slots; padding where a position is absent
    missing: torch.Tensor  # [b, k] int32, positions to fetch, ABSENT where there is none
    targets: torch.Tensor  # [b, k] int32, the device slots they go to; padding where there is none


class _PlanSwapIn(NamedTuple):
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    device_buffer: torch.Tensor
    tokens: torch.Tensor
    lru: torch.Tensor
    lookups: torch.Tensor
    max_seq_len: int

    def meta(self) -> SwapPlan:
        return SwapPlan(*(nothing(*self.positions.shape, dtype=torch.int32) for _ in range(3)))

    def cost(self) -> Work:
        """The whole buffer of each request is looked through; its order is written anew."""
        per_row = self.tokens.shape[1] * (self.tokens.element_size() + 2 * self.lru.element_size())
        rows = self.req_pool_indices.shape[0]
        lens = nbytes(self.req_pool_indices, self.seq_lens)
        return Work(rows * per_row + 8 * nbytes(self.positions) + lens)

    def footprint(self) -> tuple[Access, ...]:
        rows = self.req_pool_indices
        held = self.seq_lens.clamp(max=self.lru.shape[1] + 1)
        return (
            *reads(self.positions, rows, self.seq_lens),
            Access(self.device_buffer, write=False, rows=rows, lens=held),
            *(Access(table, write, rows) for table in (self.tokens, self.lru) for write in (False, True)),
            Access(self.lookups, write=True),
        )


@kernel(
    "plan_swap_in(Tensor positions, Tensor req_pool_indices, Tensor seq_lens, Tensor device_buffer, "
    "Tensor(a!) tokens, Tensor(b!) lru, Tensor(c!) lookups, int max_seq_len) -> (Tensor, Tensor, Tensor)",
    meta=lambda *args: _PlanSwapIn(*args).meta(),
    cost=lambda *args: _PlanSwapIn(*args).cost(),
    footprint=lambda *args: _PlanSwapIn(*args).footprint(),
    integer=True,
    triton="plan",
)
def plan_swap_in(
    positions: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    device_buffer: torch.Tensor,
    tokens: torch.Tensor,
    lru: torch.Tensor,
    lookups: torch.Tensor,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A ``SwapPlan`` for the chosen ``positions`` [b, k] of requests with ``seq_lens`` [b], the newest token included:
    ascending, ABSENT behind them.

    ``device_buffer`` [rows, B + page] int64 are the device slots of each buffer, ``tokens`` [rows, B] int32 what lies
    in them, ``lru`` [rows, B] int16 their order, the least recently used in front; ``lookups`` [2] int64 counts
    the tokens looked for in buffers of long requests, and those not found.

    The i-th missing token takes the i-th slot of that order that is not asked for. Afterwards the order is: slots not
    asked for, slots just filled, slots that were hit.
    """
    rows, size = req_pool_indices, lru.shape[1]
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
    "plan_unseen(Tensor positions, Tensor req_pool_indices, Tensor seq_lens, Tensor device_buffer, "
    "Tensor(a!) tokens, Tensor(b!) lru, Tensor(c!) lookups, int max_seq_len) -> (Tensor, Tensor, Tensor)",
    meta=lambda *args: _PlanSwapIn(*args).meta(),
    cost=lambda *args: _PlanSwapIn(*args).cost(),
    footprint=lambda *args: _PlanSwapIn(*args).footprint(),
    integer=True,
)
def plan_unseen(positions: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The launch of a ``plan_swap_in`` whose plan nobody looks at, and nothing of what it does: for layers that choose
    what the first one has chosen. Only where floats are skipped."""
    nobody = torch.zeros_like(positions)
    return nobody, nobody.clone(), nobody.clone()


def _width(seq_lens: torch.Tensor, bound: int) -> int:
    return int(seq_lens.max()) if seq_lens.device.type == "cpu" else bound


def _slots_of(where: torch.Tensor, tokens: torch.Tensor, width: int) -> torch.Tensor:
    """The buffer slot [b, k] int64 that holds each position, or ABSENT.

    Where ``width``, a bound on the lengths, is below the buffer's size nobody is long and the answer is not used.
    """
    table = torch.full((where.shape[0], width), ABSENT, dtype=torch.int16, device=where.device)
    slots = torch.arange(tokens.shape[1], dtype=torch.int16, device=where.device).expand_as(tokens)
    table.scatter_(1, tokens.to(torch.int64).clamp(max=width - 1), slots)
    return table.gather(1, where.clamp(max=width - 1)).to(torch.int64)


def _turned(order: torch.Tensor, hit: torch.Tensor, miss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def _written(tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Buffers [b, B] with ``positions`` [b, k] in ``slots`` [b, k]; slot B is nobody's."""
    padded = torch.cat([tokens, tokens[:, :1]], dim=1)
    return padded.scatter_(1, slots, positions)[:, :-1]


class _SwapIn(NamedTuple):
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    host: torch.Tensor
    host_slots: torch.Tensor
    req_pool_indices: torch.Tensor
    missing: torch.Tensor
    targets: torch.Tensor

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        fetched = int((self.missing > ABSENT).sum()) * token_bytes(self.k_cache)
        return Work(nbytes(self.missing, self.targets) + fetched, host_bytes=fetched)

    def footprint(self) -> tuple[Access, ...]:
        fetched = self.missing > ABSENT
        request, _ = fetched.nonzero(as_tuple=True)
        rows = self.host_slots[self.req_pool_indices[request], self.missing[fetched]]
        targets = self.targets[fetched]
        return (
            *reads(self.req_pool_indices, self.missing, self.targets),
            Access(self.host_slots, write=False, rows=self.req_pool_indices, lens=self.missing.amax(1) + 1),
            Access(self.host, write=False, rows=rows),
            Access(self.k_cache, write=True, rows=targets),
            Access(self.v_cache, write=True, rows=targets),
        )


def token_bytes(cache: torch.Tensor) -> int:
    """Of one token's keys and values in one layer; ``cache`` [slots, kv_heads, d] is either."""
    return 2 * cache.shape[1] * cache.shape[2] * cache.element_size()


@declared(
    "swap_in(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor host, Tensor host_slots, Tensor req_pool_indices, "
    "Tensor missing, Tensor targets) -> ()",
    _SwapIn,
    fixed_cost=False,
    triton="swap",
    strided=("host",),
)
def swap_in(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    host: torch.Tensor,
    host_slots: torch.Tensor,
    req_pool_indices: torch.Tensor,
    missing: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Gathers one layer's KV of the ``missing`` positions [b, k] int32 from pinned memory into the device slots
    ``targets`` [b, k] int32.

    Caches are [slots, kv_heads, d]; ``host`` [host slots, 2, kv_heads, d] is the layer's part of the host pool, of
    which ``host_slots`` [rows, context] int64 says where each position lies. What is absent goes to the padding slot.
    """
    rows = host_slots[req_pool_indices.unsqueeze(1), missing.clamp(min=0)].where(missing > ABSENT, PADDING)
    kv = host[rows.flatten().to(host.device)].to(k_cache.device)
    slots = targets.flatten().to(torch.int64)
    k_cache.index_copy_(0, slots, kv[:, 0])
    v_cache.index_copy_(0, slots, kv[:, 1])
