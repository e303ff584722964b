"""Attention of each request's last tokens: prefix and new tokens alike are in the cache.

A program has some rows of one request, a row being a token with one head of the group that shares keys and values::

    group of 3      t0 h0 | t0 h1 | t0 h2 | t1 h0 | t1 h1 | ...
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import PagedQueries
from .softmax import LOG2_E, attend, begin, block_of, padded


@triton.jit
def sum_before(lens, request):
    """The sum of the first ``request`` of ``lens``."""
    total = tl.zeros([], tl.int64)
    for first in range(0, request, 256):
        at = first + tl.arange(0, 256)
        total += tl.sum(tl.load(lens + at, mask=at < request, other=0).to(tl.int64), 0)
    return total


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
    top, weight, value = begin(members, dim)
    ends = tl.minimum(length - new + ((part + 1) * members - 1) // group + 1, length)
    ends = tl.maximum(ends, 1)
    for first in range(0, ends, block):
        cached = first + tl.arange(0, block)
        seen = cached < ends
        slots = tl.load(row + cached, mask=seen, other=0).to(tl.int64)
        visible = cached[None, :] <= position[:, None]
        places = (slots * kv_heads + kv_head) * width
        top, weight, value = attend(
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
    tiles = (members, padded(width), block_of(k_cache), triton.knobs.runtime.interpret)
    sizes = (req_to_token.shape[1], kv_heads, group, width, *tiles)
    _extend[grid](*paged, extend_lens, out, scale * LOG2_E, *sizes, num_warps=8 if members == 128 else 4)
    return out
