"""Sparse attention: scores of all cached tokens, the best of them without a sort, and a decode that attends to them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sparse import Scored
from .attention import decode_attention, padded
from .sampling import BLOCK, order

_PROGRAMS = 1024
_POSITIONS = 64  # of one block of scores
_SLAB = 1 << 26  # scores held at once
_PLACES = tl.constexpr(16)


@triton.jit(do_not_specialize=["context", "most"], do_not_specialize_on_alignment=["rows", "lens"])
def _score(
    q,
    weights,
    cache,
    table,
    rows,
    lens,
    out,
    context,
    most,
    heads: tl.constexpr,
    width: tl.constexpr,
    members: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lens + token), most)
    row = table + tl.load(rows + token).to(tl.int64) * context
    head, at = tl.arange(0, members), tl.arange(0, dim)
    inside = (head < heads)[:, None] & (at < width)[None, :]
    queries = tl.load(q + (token * heads + head)[:, None] * width + at[None, :], mask=inside, other=0.0)
    weight = tl.load(weights + token * heads + head, mask=head < heads, other=0.0).to(tl.float32)
    for first in range(tl.program_id(1) * block, length, tl.num_programs(1) * block):
        position = first + tl.arange(0, block)
        seen = position < length
        slots = tl.load(row + position, mask=seen, other=0).to(tl.int64)
        valid = seen[:, None] & (at < width)[None, :]
        keys = tl.load(cache + slots[:, None] * width + at[None, :], mask=valid, other=0.0)
        if wide:
            queries, keys = queries.to(tl.float32), keys.to(tl.float32)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        score = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
        tl.store(out + token * most + position, score + 0.0, mask=seen)


@triton.jit
def _above(scores, length, places):
    """The number of scores above each of ``places`` [16] int64."""
    count = tl.zeros([_PLACES], tl.int32)
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        keys = order(tl.load(scores + at, mask=at < length, other=0.0))
        above = (keys[:, None] > places.to(tl.int32)[None, :]) & (at < length)[:, None]
        count += tl.sum(above.to(tl.int32), 0)
    return count


@triton.jit
def _bar(scores, length, top_k: tl.constexpr):
    """The ``top_k``-th largest score as an ordered integer, searched with sixteen probes at a time."""
    bar = tl.full([], -2147483648, tl.int64)
    for nibble in range(8):
        size = tl.full([], 1, tl.int64) << (28 - 4 * nibble)
        count = _above(scores, length, bar + (tl.arange(0, _PLACES) + 1) * size - 1)
        bar += tl.minimum(tl.sum((count >= top_k).to(tl.int64), 0), 15) * size
    return bar


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["lens", "out"])
def _choose(scores, lens, out, most, top_k: tl.constexpr) -> None:
    """Writes the chosen positions of each token: all of them if there are no more than ``top_k``."""
    token = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lens + token), most)
    scores += token * most
    out += token * top_k
    bar = tl.full([], -2147483648, tl.int64)
    if length > top_k:
        bar = _bar(scores, length, top_k)
    equals = top_k - tl.max(_above(scores, length, bar + tl.zeros([_PLACES], tl.int64)), 0)
    taken, equal_before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        valid = at < length
        keys = order(tl.load(scores + at, mask=valid, other=0.0)).to(tl.int64)
        equal = valid & (keys == bar)
        nth = equal_before + tl.cumsum(equal.to(tl.int32), 0)
        equal_before = tl.max(nth, 0)
        kept = (valid & (keys > bar)) | (equal & (nth <= equals))
        place = taken + tl.cumsum(kept.to(tl.int32), 0) - 1
        taken = tl.max(place, 0) + 1
        tl.store(out + place, at, mask=kept)
    for first in range(0, top_k, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out + at, tl.full([BLOCK], -1, tl.int32), mask=(at >= taken) & (at < top_k))


def select_top_k(scored, top_k, max_seq_len):
    """[n, top_k] int32: the positions of each token's best scores, ascending, ABSENT behind them. A token has the first
    ``seq_lens`` of its row; ``max_seq_len`` is the host's bound on these."""
    n, heads, width = scored.q.shape
    out = torch.empty((n, top_k), dtype=torch.int32, device=scored.q.device)
    sizes = (heads, width, padded(heads), padded(width), _POSITIONS)
    for start in range(0, n, per_slab := max(1, _SLAB // max(max_seq_len, 1))):
        part = slice(start, start + per_slab)
        q, weights, cache, table, rows, lens = scored
        q, weights, rows, lens = q[part], weights[part], rows[part], lens[part]
        scores = torch.empty((q.shape[0], max_seq_len), dtype=torch.float32, device=q.device)
        pieces = min(max(_PROGRAMS // q.shape[0], 1), triton.cdiv(max_seq_len, _POSITIONS))
        tensors = (q, weights, cache, table, rows, lens, scores)
        _score[(q.shape[0], pieces)](
            *tensors, table.shape[1], max_seq_len, *sizes, triton.knobs.runtime.interpret
        )
        _choose[(q.shape[0],)](scores, lens, out[part], max_seq_len, top_k, num_warps=8)
    return out


@triton.jit(do_not_specialize_on_alignment=["out_cache_loc"])
def _index_and_store(
    projected, out_cache_loc, cache, q, weights, heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(out_cache_loc + token).to(tl.int64)
    queries: tl.constexpr = heads * width
    total: tl.constexpr = queries + width + heads
    at = tl.program_id(1) * block + tl.arange(0, block)
    value = tl.load(projected + token * total + at, mask=at < total, other=0.0)
    tl.store(q + token * queries + at, value, mask=at < queries)
    is_key = (at >= queries) & (at < queries + width)
    tl.store(cache + slot * width + at - queries, value, mask=is_key)
    is_weight = (at >= queries + width) & (at < total)
    tl.store(weights + token * heads + at - queries - width, value, mask=is_weight)


def index_and_store(projected, out_cache_loc, index_cache, heads):
    tokens, width = projected.shape[0], index_cache.shape[1]
    q = torch.empty((tokens, heads, width), dtype=projected.dtype, device=projected.device)
    weights = torch.empty((tokens, heads), dtype=projected.dtype, device=projected.device)
    if tokens:
        tensors = (projected, out_cache_loc, index_cache, q, weights)
        grid = (tokens, triton.cdiv(projected.shape[1], BLOCK.value))
        _index_and_store[grid](*tensors, heads, width, BLOCK.value)
    return q, weights


@triton.jit(do_not_specialize=["context", "k"], do_not_specialize_on_alignment=["rows"])
def _page_lookup(positions, table, rows, mapping, out, context, k, block: tl.constexpr) -> None:
    """Looks up the slots of one token's positions and, with a ``mapping``, translates them."""
    token = tl.program_id(0).to(tl.int64)
    row = table + tl.load(rows + token).to(tl.int64) * context
    at = tl.program_id(1) * block + tl.arange(0, block)
    position = tl.load(positions + token * k + at, mask=at < k, other=-1)
    slot = tl.load(row + position, mask=position >= 0, other=0)
    if mapping is not None:
        slot = tl.load(mapping + slot, mask=at < k, other=0).to(tl.int32)
    tl.store(out + token * k + at, slot, mask=at < k)


def located(positions: Tensor, req_to_token: Tensor, rows: Tensor, mapping: Tensor | None) -> Tensor:
    """[n, k] int32 slots of ``positions`` [n, k], translated by ``mapping`` if it is given."""
    n, k = positions.shape
    out = torch.empty((n, k), dtype=torch.int32, device=positions.device)
    if n:
        tensors = (positions, req_to_token, rows, mapping, out)
        _page_lookup[(n, triton.cdiv(k, BLOCK.value))](*tensors, req_to_token.shape[1], k, BLOCK.value)
    return out


def page_lookup(positions, req_to_token, req_pool_indices):
    return located(positions, req_to_token, req_pool_indices, None)


def sparse_attention(q, k_cache, v_cache, locations, seq_lens, scale):
    return decode_attention(q, (k_cache, v_cache), locations, None, seq_lens, scale=scale)


def sparse_extend(tokens, scale, top_k, max_seq_len):
    """Every token is a request of its own, as in a decode."""
    q, *caches, index_q, index_weights, index_cache, req_to_token, mapping, rows, positions, _, new = tokens
    rows = rows.repeat_interleave(new, output_size=q.shape[0])
    scored = Scored(index_q, index_weights, index_cache, req_to_token, rows, positions + 1)
    locations = located(select_top_k(scored, top_k, max_seq_len), req_to_token, rows, mapping)
    return decode_attention(q, caches, locations, None, positions + 1, scale=scale)
