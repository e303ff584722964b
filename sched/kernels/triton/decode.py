"""Attention of one token per request: each request's cache is cut into splits, whose results are then combined.

The grid is fixed, and each program reads the lengths on the device, so that a captured graph reads no more than the
lengths of the batch at each replay::

    cache of a request    |---- split 0 ----|---- split 1 ----|-- split 2 --|   (splits 3, 4, ... return at once)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .softmax import LOG2_E, attend, begin, block_of, padded

_LEAST = 128  # positions of a split
_MOST_SPLITS = 64
_PROGRAMS = 1024  # enough to keep every multiprocessor of today's GPUs busy


@triton.jit
def _split_size(length, splits, least: tl.constexpr, block: tl.constexpr):
    """Positions of each split of a cache of that length, whole blocks."""
    size = tl.maximum(tl.cdiv(length, splits), least)
    return tl.cdiv(size, block) * block


@triton.jit
def _slots(table, branch, position, mask, start, branched: tl.constexpr):
    """Slots [block] of the positions, those from ``start`` on in ``branch``."""
    if branched:
        own = position >= start
        first = tl.load(table + position, mask=mask & (position < start), other=0).to(tl.int64)
        second = tl.load(branch + position - start, mask=mask & own, other=0).to(tl.int64)
        return tl.where(own, second, first)
    else:
        return tl.load(table + position, mask=mask, other=0).to(tl.int64)


@triton.jit
def _length(seq_lens, request, context):
    """At least 1: a graph's padding may have a length of 0, and then attends to the padding slot."""
    return tl.minimum(tl.maximum(tl.load(seq_lens + request), 1), context)


@triton.jit(
    do_not_specialize=["context", "depth"],
    do_not_specialize_on_alignment=["rows", "seq_lens", "branches", "branch_lens"],
)
def _decode(
    q,
    k_cache,
    v_cache,
    table,
    rows,
    seq_lens,
    branches,
    branch_lens,
    values,
    tops,
    scale,
    context,
    depth,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    least: tl.constexpr,
    members: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    length = _length(seq_lens, request, context)
    size = _split_size(length, splits, least, block)
    begins = split * size
    if begins >= length:
        return
    ends = tl.minimum(begins + size, length)
    row = request if rows is None else tl.load(rows + request).to(tl.int64)
    branch, start = branches, length
    if branches is not None:
        branch = branches + request * depth
        start = length - tl.load(branch_lens + request)
    member, at = tl.arange(0, members), tl.arange(0, dim)
    head = request * kv_heads * group + kv_head * group + member
    inside = (member < group)[:, None] & (at < width)[None, :]
    queries = tl.load(q + head[:, None] * width + at[None, :], mask=inside, other=0.0)
    top, weight, value = begin(members, dim)
    for first in range(begins, ends, block):
        position = first + tl.arange(0, block)
        seen = position < ends
        slots = _slots(table + row * context, branch, position, seen, start, branches is not None)
        places = (slots * kv_heads + kv_head) * width
        top, weight, value = attend(
            top, weight, value, queries, k_cache, v_cache, places, seen, seen[None, :], at, width, scale, wide
        )
    place = head * splits + split
    tl.store(values + place[:, None] * width + at[None, :], value / weight[:, None], mask=inside)
    tl.store(tops + place, top + tl.log2(weight), mask=member < group)


@triton.jit(do_not_specialize=["splits", "context"], do_not_specialize_on_alignment=["seq_lens"])
def _combine(
    values,
    tops,
    seq_lens,
    out,
    splits,
    context,
    heads: tl.constexpr,
    width: tl.constexpr,
    least: tl.constexpr,
    block: tl.constexpr,
    most: tl.constexpr,
    dim: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    head = request * heads + tl.program_id(1)
    length = _length(seq_lens, request, context)
    used = tl.cdiv(length, _split_size(length, splits, least, block))
    split, at = tl.arange(0, most), tl.arange(0, dim)
    top = tl.load(tops + head * splits + split, mask=split < used, other=float("-inf"))
    share = tl.exp2(top - tl.max(top, 0))
    mask = (split < used)[:, None] & (at < width)[None, :]
    value = tl.load(values + (head * splits + split)[:, None] * width + at[None, :], mask=mask, other=0.0)
    total = tl.sum(value * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + head * width + at, total.to(out.dtype.element_ty), mask=at < width)


def decode_attention(
    q: Tensor,
    caches: Sequence[Tensor],
    table: Tensor,
    rows: Tensor | None,
    seq_lens: Tensor,
    *,
    scale: float,
    branches: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> Tensor:
    """q [b, heads, d] → [b, heads · d]. Request i has row ``rows[i]`` of the ``table`` of slots, or row i without
    ``rows``, and sees its first ``seq_lens[i]`` positions; ``branches`` are those of ``tree_attention``."""
    b, heads, width = q.shape
    kv_heads = caches[0].shape[1]
    group, dim, block = heads // kv_heads, padded(width), block_of(caches[0])
    out = torch.empty((b, heads * width), dtype=q.dtype, device=q.device)
    if not b:
        return out
    splits = min(max(_PROGRAMS // (b * kv_heads), 1), triton.cdiv(table.shape[1], _LEAST), _MOST_SPLITS)
    values = torch.empty((b, heads, splits, width), dtype=torch.float32, device=q.device)
    tops = torch.empty((b, heads, splits), dtype=torch.float32, device=q.device)
    context, depth = table.shape[1], 0 if branches[0] is None else branches[0].shape[1]
    members = max(16, triton.next_power_of_2(group))
    tensors = (q, *caches, table, rows, seq_lens, *branches, values, tops)
    sizes = (kv_heads, group, width, _LEAST, members, dim, block, triton.knobs.runtime.interpret)
    _decode[(b, kv_heads, splits)](*tensors, scale * LOG2_E, context, depth, *sizes)
    combined = (splits, context, heads, width, _LEAST, block, _MOST_SPLITS, dim)
    _combine[(b, heads)](values, tops, seq_lens, out, *combined)
    return out
