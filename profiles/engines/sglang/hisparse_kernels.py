"""SGLang's CUDA kernels that move KV between hot buffers and the host, each as one kernel of its own.

Unlike those in ``kernels.py`` their time and their accesses follow from their values, and they access pinned memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ....sched.kernels.declare import Access, Work, Written, kernel, nbytes, reads
from ....sched.kernels.hot_buffers import slots_of, turned
from ....sched.kernels.sparse import ABSENT, PADDING

_LAYERS: Final[dict[int, Sequence[Tensor]]] = {}  # by the address of the table of their addresses


class Swap(NamedTuple):
    """The chosen positions of n requests, and the hot buffers of one layer, of B slots."""

    positions: Tensor  # [n, k] int32, ascending, ABSENT behind them
    tokens: Written  # [rows, B + page] int32, the positions that the buffers hold
    host_slots: Tensor  # [rows, context] int64
    slots: Tensor  # [rows, B + page] int32, the device slots of each buffer
    host: Tensor  # [host slots, 1, d], pinned
    device: Written  # [device slots, 1, d]
    locations: Written  # [n, k] int32, where the chosen tokens are on the device
    req_pool_indices: Tensor  # [n]
    seq_lens: Tensor  # [n], the newest token included
    lru: Written  # [rows, B] int16, the buffers' slots, the least recently used in front
    real: Tensor  # [1] int32, how many of the n are no padding


class Planned(NamedTuple):
    """What a swap does for the requests that are longer than their buffers."""

    long: Tensor  # [m], their indices in the batch
    rows: Tensor  # [m], their rows
    missing: Tensor  # [m, k] bool
    filled: Tensor  # [m, k] int64, the buffer's slot for each missing position
    order: Tensor  # [m, B] int64
    found: Tensor  # [m, k] int64, the buffer's slot of each position


def _planned(swap: Swap) -> Planned:
    size, count = swap.lru.shape[1], int(swap.real)
    long = (swap.seq_lens[:count] > size).nonzero().squeeze(1)
    rows, lens = swap.req_pool_indices[long], swap.seq_lens[long]
    where = swap.positions[long].to(torch.int64)
    held = slots_of(where, swap.tokens[rows, :size], int(lens.max()) if len(long) else 1)
    newest = where == (lens - 1).unsqueeze(1)
    missing = (held == ABSENT) & ~newest
    hit = held.where(~missing & ~newest, size)
    filled, order = turned(swap.lru[rows].to(torch.int64), hit, missing)
    return Planned(long, rows, missing, filled, order, filled.where(missing, hit))


def _swap_cost(swap: Swap) -> Work:
    """The whole buffer of each long request is searched, and its order is rewritten; what is missing is copied."""
    plan = _planned(swap)
    searched = plan.rows.shape[0] * (nbytes(swap.tokens[0]) + 2 * nbytes(swap.lru[0]))
    fetched = int(plan.missing.sum()) * nbytes(swap.host[0])
    tables = 2 * nbytes(swap.positions) + nbytes(swap.req_pool_indices, swap.seq_lens)
    return Work(searched + tables + fetched, host_bytes=fetched)


def _swap_footprint(swap: Swap) -> tuple[Access, ...]:
    plan = _planned(swap)
    count, size = int(swap.real), swap.lru.shape[1]
    rows, lens = swap.req_pool_indices[:count], swap.seq_lens[:count]
    sources, targets = _copied(swap, plan)
    longest, used = swap.positions[:count].amax(1) + 1, torch.arange(count)
    return (
        *reads(swap.real),
        *(Access(given, False, used) for given in (swap.positions, swap.req_pool_indices, swap.seq_lens)),
        Access(swap.slots, write=False, rows=rows, lens=lens.clamp(max=size + 1)),
        *(Access(table, write, plan.rows) for table in (swap.tokens, swap.lru) for write in (False, True)),
        Access(swap.host_slots, write=False, rows=rows, lens=longest.where(lens > size, 0)),
        Access(swap.host, write=False, rows=sources),
        Access(swap.device, write=True, rows=targets),
        Access(swap.locations, write=True),
    )


def _copied(swap: Swap, plan: Planned) -> Sequence[Tensor]:
    """The host slots and the device slots of the missing tokens."""
    request, _ = plan.missing.nonzero(as_tuple=True)
    positions = swap.positions[plan.long][plan.missing].to(torch.int64)
    rows = plan.rows[request]
    return swap.host_slots[rows, positions], swap.slots[rows, plan.filled[plan.missing]].to(torch.int64)


@kernel(cost=_swap_cost, footprint=_swap_footprint, fixed_cost=False)
def load_cache_to_device_buffer(swap: Swap) -> None:
    """SGLang's kernel of that name for keys and values of one token in one row. Where a position is absent the location
    is the padding slot, in place of SGLang's -1."""
    count, size = int(swap.real), swap.lru.shape[1]
    plan = _planned(swap)
    sources, targets = _copied(swap, plan)
    swap.device.index_copy_(0, targets, swap.host.index_select(0, sources))
    positions = swap.positions[:count].to(torch.int64)
    places = positions.clamp(min=0, max=size)
    places[plan.long] = plan.found
    found = swap.slots[swap.req_pool_indices[:count].unsqueeze(1), places]
    swap.locations.fill_(PADDING)
    swap.locations[:count] = found.where(positions > ABSENT, PADDING)
    request, _ = plan.missing.nonzero(as_tuple=True)
    swap.tokens[plan.rows[request], plan.filled[plan.missing]] = swap.positions[plan.long][plan.missing]
    swap.lru[plan.rows] = plan.order.to(swap.lru.dtype)


def _backup_cost(device: Sequence[Tensor], slots: Tensor, host_slots: Tensor) -> Work:
    moved = len(slots) * nbytes(*(layer[0] for layer in device))
    return Work(nbytes(slots, host_slots) + moved, host_bytes=moved, beside=True)


@kernel(cost=_backup_cost, rows={"device": "slots", "host": "host_slots"})
def copy_kv_to_host(
    host: Sequence[Written], host_slots: Tensor, device: Sequence[Tensor], slots: Tensor
) -> None:
    """Copies rows of all layers, from the ``slots`` [n] int64 of ``device`` [slots, 1, d] each to ``host_slots`` [n]
    int64 of ``host`` [host slots, 1, d] each, pinned."""
    for target, source in zip(host, device, strict=True):
        target.index_copy_(0, host_slots, source.index_select(0, slots))


def swap_in(*given: Any) -> None:
    """The arguments of SGLang's CUDA function. Those of values, sizes and plans of other layers are not needed."""
    positions, tokens, host_slots, slots, host, _, device, _, locations, rows, lens, lru, real = given[:13]
    load_cache_to_device_buffer(
        positions, tokens, host_slots, slots, host, device, locations, rows, lens, lru, real
    )


def back_up(host: Tensor, host_slots: Tensor, device: Tensor, slots: Tensor, *_: Any) -> None:
    """``host`` and ``device`` are tables of addresses, which ``at_addresses`` has been called with."""
    copy_kv_to_host(_LAYERS[host.data_ptr()], host_slots, _LAYERS[device.data_ptr()], slots)


def back_up_by_names(
    src_layers: Tensor, dst_layers: Tensor, src_indices: Tensor, dst_indices: Tensor, **_: Any
) -> None:
    """``back_up`` with the arguments of the function in ``sgl_kernel``."""
    back_up(dst_layers, dst_indices, src_layers, src_indices)


def at_addresses(table: Tensor, layers: Sequence[Tensor]) -> None:
    """Name the tensors whose addresses the ``table`` on the device has."""
    _LAYERS[table.data_ptr()] = list(layers)
