"""Dense and tree attention, each by the decode kernel or the extend kernel. Sparse attention is a decode, too.

In a decode each request's cache is cut into splits, whose results are then combined. The grid is fixed, and each
program reads the lengths on the device, so that a captured graph reads no more than the lengths of the batch at each
replay::

    cache of a request    |---- split 0 ----|---- split 1 ----|-- split 2 --|   (splits 3, 4, ... return at once)

In an extend prefix and new tokens alike are in the cache. A program has some rows of one request, a row being a token
with one head of the group that shares keys and values::

    group of 3      t0 h0 | t0 h1 | t0 h2 | t1 h0 | t1 h1 | ...
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import PagedQueries
from .rows import sum_before

_LOG2_E = 1.4426950408889634
_LEAST = 128  # positions of a split
_MOST_SPLITS = 64
_PROGRAMS = 1024  # enough to keep every multiprocessor of today's GPUs busy


@triton.jit
def _begin(rows: tl.constexpr, dim: tl.constexpr):
    """The initial top [rows], weight [rows] and value [rows, dim]. The top is finite, so that a block that is masked
    for a whole row gives weights of 0."""
    top = tl.full([rows], -1e30, tl.float32)
    return top, tl.zeros([rows], tl.float32), tl.zeros([rows, dim], tl.float32)


@triton.jit
def _attend(
    top,
    weight,
    value,
    q,
    k_cache,
    v_cache,
    places,
    seen,
    visible,
    at,
    width: tl.constexpr,
    scale,
    wide: tl.constexpr,
):
    """Adds to top, weight and value the attention of q [rows, dim] to the heads of the cache that begin at ``places``
    [block], in the precision that tensor cores add up in. ``seen`` [block] are there, and each row sees those that are
    ``visible`` [rows, block]. ``scale`` is in powers of two.

    The interpreter cannot compute with bfloat16, so ``wide`` makes everything float32.
    """
    mask = seen[:, None] & (at < width)[None, :]
    k = tl.load(k_cache + places[:, None] + at[None, :], mask=mask, other=0.0)
    v = tl.load(v_cache + places[:, None] + at[None, :], mask=mask, other=0.0)
    if wide:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores - higher[:, None])
    decay = tl.exp2(top - higher)
    value = value * decay[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
    return higher, weight * decay + tl.sum(shares, 1), value


def padded(size: int) -> int:
    """Rows or elements of a tile of ``size``: tensor cores need 16 or more."""
    return max(16, int(triton.next_power_of_2(size)))


def _block_of(cache: Tensor) -> int:
    """Positions of one block: 16 KiB of keys and as much of values, which the loop holds several times over."""
    size = 16384 // (padded(cache.shape[2]) * cache.element_size())
    return min(max(size, 16), 128)


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
    top, weight, value = _begin(members, dim)
    for first in range(begins, ends, block):
        position = first + tl.arange(0, block)
        seen = position < ends
        slots = _slots(table + row * context, branch, position, seen, start, branches is not None)
        places = (slots * kv_heads + kv_head) * width
        top, weight, value = _attend(
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
    group, dim, block = heads // kv_heads, padded(width), _block_of(caches[0])
    out = torch.empty((b, heads * width), dtype=q.dtype, device=q.device)
    if not b:
        return out
    splits = min(max(_PROGRAMS // (b * kv_heads), 1), triton.cdiv(table.shape[1], _LEAST), _MOST_SPLITS)
    values = torch.empty((b, heads, splits, width), dtype=torch.float32, device=q.device)
    tops = torch.empty((b, heads, splits), dtype=torch.float32, device=q.device)
    context, depth = table.shape[1], 0 if branches[0] is None else branches[0].shape[1]
    members = padded(group)
    tensors = (q, *caches, table, rows, seq_lens, *branches, values, tops)
    sizes = (kv_heads, group, width, _LEAST, members, dim, block, triton.knobs.runtime.interpret)
    _decode[(b, kv_heads, splits)](*tensors, scale * _LOG2_E, context, depth, *sizes)
    combined = (splits, context, heads, width, _LEAST, block, _MOST_SPLITS, dim)
    _combine[(b, heads)](values, tops, seq_lens, out, *combined)
    return out


@triton.jit(do_not_specialize=["context"], do_not_specialize_on_alignment=["rows", "seq_lens", "extend_lens"])
def _extend(
    q,
    k_cache,
    v_cache,
    table,
    rows,
    seq_lens,
    extend_lens,
    out,
    scale,
    context,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    members: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    part, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    new = tl.load(extend_lens + request)
    if part * members >= new * group:
        return
    length = tl.load(seq_lens + request)
    member = part * members + tl.arange(0, members)
    at = tl.arange(0, dim)
    token, real = member // group, member < new * group
    position = tl.maximum(length - new + token, 0)  # a graph's padding may be longer than its request
    head = (sum_before(extend_lens, request) + token) * kv_heads * group + kv_head * group + member % group
    inside = real[:, None] & (at < width)[None, :]
    queries = tl.load(q + head[:, None] * width + at[None, :], mask=inside, other=0.0)
    row = table + tl.load(rows + request).to(tl.int64) * context
    top, weight, value = _begin(members, dim)
    ends = tl.minimum(length - new + ((part + 1) * members - 1) // group + 1, length)
    ends = tl.maximum(ends, 1)
    for first in range(0, ends, block):
        cached = first + tl.arange(0, block)
        seen = cached < ends
        slots = tl.load(row + cached, mask=seen, other=0).to(tl.int64)
        visible = cached[None, :] <= position[:, None]
        places = (slots * kv_heads + kv_head) * width
        top, weight, value = _attend(
            top, weight, value, queries, k_cache, v_cache, places, seen, visible, at, width, scale, wide
        )
    value = value / weight[:, None]
    tl.store(out + head[:, None] * width + at[None, :], value.to(out.dtype.element_ty), mask=inside)


def extend_attention(
    paged: PagedQueries, extend_lens: Tensor, *, scale: float, max_extend_len: int
) -> Tensor:
    """[T, heads · d] of the queries of each request's last ``extend_lens`` [b] tokens."""
    q, k_cache, req_to_token = paged.q, paged.k_cache, paged.req_to_token
    tokens, heads, width = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    # Zeros: a graph's padding has tokens that belong to no request, and later kernels compute with them.
    out = torch.zeros((tokens, heads * width), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    # float32 has no tensor cores: its tiles are held in registers.
    members = 128 if q.element_size() == 2 else 32
    grid = (triton.cdiv(max_extend_len * group, members), kv_heads, paged.seq_lens.shape[0])
    tiles = (members, padded(width), _block_of(k_cache), triton.knobs.runtime.interpret)
    sizes = (req_to_token.shape[1], kv_heads, group, width, *tiles)
    _extend[grid](*paged, extend_lens, out, scale * _LOG2_E, *sizes, num_warps=8 if members == 128 else 4)
    return out


def attention(paged, extend_lens, scale, max_extend_len):
    q, *caches, req_to_token, rows, seq_lens = paged
    if extend_lens is None:
        return decode_attention(q, caches, req_to_token, rows, seq_lens, scale=scale)
    return extend_attention(paged, extend_lens, scale=scale, max_extend_len=max_extend_len)


def tree_attention(paged, branches, branch_lens, scale):
    q, *caches, req_to_token, rows, seq_lens = paged
    tree = (branches, branch_lens)
    return decode_attention(q, caches, req_to_token, rows, seq_lens, scale=scale, branches=tree)
