"""With values none: tags of the KV in its slots on the device and on the host, checked when it is attended to.

The tags of ``tags.py`` belong to logical slots and follow tokens, lengths and the page table. These belong to memory
slots: every kernel that moves KV moves them, and a wrong slot shows as a difference of the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .declare import kernel, reads
from .indexer import ABSENT
from .registry import Access
from .sparse import PADDING

_DRIFT = -0x61C8864680B583EB  # odd, as an int64


@kernel(
    mutates=("target",),
    cost=None,
    footprint=lambda target, target_slots, source, source_slots: (
        *reads(target_slots, source_slots),
        Access(source, write=False, rows=source_slots.clamp(min=0).flatten()),
        Access(target, write=True, rows=target_slots.where(source_slots != ABSENT, PADDING).flatten()),
    ),
    integer=True,
)
def move_tags(target: Tensor, target_slots: Tensor, source: Tensor, source_slots: Tensor) -> None:
    """``target[target_slots] = source[source_slots]``; a source slot that is ABSENT goes to the padding."""
    absent = source_slots == ABSENT
    slots = target_slots.where(~absent, PADDING).flatten().to(torch.int64)
    target.index_copy_(0, slots, source[source_slots.clamp(min=0).flatten().to(torch.int64)])


@kernel(
    mutates=("device_tags",),
    cost=None,
    footprint=lambda device_tags, host_tags, host_slots, req_pool_indices, missing, targets: (
        *reads(req_pool_indices, missing, targets),
        Access(host_slots, write=False, rows=req_pool_indices, lens=missing.amax(1) + 1),
        Access(host_tags, write=False, rows=_places(host_slots, req_pool_indices, missing)),
        Access(device_tags, write=True, rows=targets.flatten()),
    ),
    integer=True,
)
def fetch_tags(
    device_tags: Tensor,
    host_tags: Tensor,
    host_slots: Tensor,
    req_pool_indices: Tensor,
    missing: Tensor,
    targets: Tensor,
) -> None:
    """Moves tags as ``swap_in`` moves KV."""
    places = _places(host_slots, req_pool_indices, missing)
    device_tags.index_copy_(0, targets.flatten().to(torch.int64), host_tags[places])


def _places(host_slots: Tensor, rows: Tensor, missing: Tensor) -> Tensor:
    """Host slots [b · k] of the missing positions; padding where there is none."""
    slots = host_slots[rows.unsqueeze(1), missing.clamp(min=0)]
    return slots.where(missing > ABSENT, PADDING).flatten()


def _misplaced_footprint(
    fingerprint: Tensor,
    device_tags: Tensor,
    tags: Tensor,
    weights: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    positions: Tensor,
    locations: Tensor,
) -> tuple[Access, ...]:
    return (
        *reads(tags, weights, req_pool_indices, positions, locations),
        Access(req_to_token, write=False, rows=req_pool_indices, lens=positions.amax(1) + 1),
        Access(device_tags, write=False, rows=locations.flatten()),
        Access(fingerprint, write=True),
    )


@kernel(mutates=("fingerprint",), cost=None, footprint=_misplaced_footprint, integer=True)
def misplaced(
    fingerprint: Tensor,
    device_tags: Tensor,
    tags: Tensor,
    weights: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    positions: Tensor,
    locations: Tensor,
) -> None:
    """Changes a request's fingerprint [b] int64 if one of the ``locations`` [b, k] that it attends to has another tag
    than the page table gives the chosen position [b, k]; each difference is multiplied by the position's weight."""
    where = positions.clamp(min=0).to(torch.int64)
    slots = req_to_token[req_pool_indices.unsqueeze(1), where].to(torch.int64)
    differ = (device_tags[locations.to(torch.int64)] - tags[slots]) * weights[where]
    fingerprint += differ.masked_fill(positions == ABSENT, 0).sum(1) * _DRIFT
