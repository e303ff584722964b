"""Sparse attention: each new token attends to the cached tokens that its indexer selects, in ascending order.

As in DeepSeek's lightning indexer (V3.2, 2025) a cached token has one small key; the score of a pair is the sum over
the index heads of weight · relu(q · k). Here the keys know no positions. Ties go to the earlier token. The chosen
tokens' KV is gathered in order of positions and summed in blocks counted from the first of them, so that the result
does not depend on the slots that it is in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .attention import (
    SLAB,
    PagedQueries,
    attended,
    attention_output,
    attention_work,
    positions_up_to,
    ragged,
)
from .declare import INT32, Access, Work, Written, kernel, meta_tensor, nbytes, reads, total_length
from .invariant import halving_sum, products, widened

ABSENT = -1  # fills a row that has fewer chosen positions than its width
PADDING = 0  # the slot that stands in for an absent token
_LAST = 1 << 30  # later than any position


def entries_at(table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """[b, k] slots at ``positions`` [b, k] of the ``rows`` [b] of a table [rows, context]; padding where a position is
    absent."""
    return table[rows.unsqueeze(1), positions.clamp(min=0)].where(positions > ABSENT, PADDING)


class Scored(NamedTuple):
    """A new token of each of b requests, and the cached tokens that it is compared with."""

    q: Tensor  # [b, heads, d]
    weights: Tensor  # [b, heads]
    index_cache: Tensor  # [slots, d], one key per token
    req_to_token: Tensor  # [rows, context] int32
    req_pool_indices: Tensor  # [b]
    seq_lens: Tensor  # [b], the new token included


@kernel(
    meta=lambda projected, index_cache, heads: (
        meta_tensor(projected.shape[0], heads, index_cache.shape[1], dtype=projected.dtype),
        meta_tensor(projected.shape[0], heads, dtype=projected.dtype),
    ),
    cost=lambda projected, out_cache_loc: Work(2 * nbytes(projected) + nbytes(out_cache_loc)),
    rows={"index_cache": "out_cache_loc"},
)
def index_and_store(
    projected: Tensor, out_cache_loc: Tensor, index_cache: Written, heads: int
) -> tuple[Tensor, Tensor]:
    """Splits projected [T, (heads + 1) · d + heads] into queries [T, heads, d], one key each, stored in slot
    ``out_cache_loc[t]`` of ``index_cache`` [slots, d], and the heads' weights [T, heads]."""
    d = index_cache.shape[1]
    q, k, weights = projected.split([heads * d, d, heads], dim=1)
    index_cache.index_copy_(0, out_cache_loc, k)
    return q.reshape(-1, heads, d).clone(), weights.clone()


def scores(scored: Scored, max_seq_len: int) -> Tensor:
    """[b, n] scores of all positions up to each token's own, -inf behind it. ``max_seq_len`` is a bound on n. A score
    depends on nothing but the query and the key."""
    q, weights, index_cache, req_to_token, rows, seq_lens = scored
    seen = positions_up_to(seq_lens, max_seq_len, req_to_token)
    out = q.new_empty(q.shape[0], seen.shape[0], dtype=widened(q[:0]).dtype)
    each = max(1, SLAB // (seen.shape[0] * q.shape[1] * q.shape[2]))
    for tokens in torch.arange(q.shape[0], device=q.device).split(each):
        hidden = seen > (seq_lens[tokens] - 1).clamp(min=0).unsqueeze(1)
        slots = req_to_token[rows[tokens], : seen.shape[0]].where(~hidden, 0)
        pairs = products(widened(q[tokens]).unsqueeze(1), widened(index_cache[slots]).unsqueeze(2))
        pairs = pairs.clamp_(min=0) * widened(weights[tokens]).unsqueeze(1)
        out[tokens] = halving_sum(pairs).squeeze(2).masked_fill_(hidden, -torch.inf)
    return out


def chosen(scored: Tensor, lens: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` best positions of each row of scores in ascending order, [T, top_k] int32, ABSENT behind them
    where ``lens`` [T], the number of positions, is smaller."""
    width = min(top_k, scored.shape[1])
    best = scored.sort(dim=1, descending=True, stable=True).indices[:, :width]
    rank = torch.arange(width, device=scored.device)
    ordered = best.where(rank < lens.unsqueeze(1), _LAST).sort(dim=1).values
    out = torch.full((scored.shape[0], top_k), ABSENT, dtype=torch.int32, device=scored.device)
    out[:, :width] = ordered.where(ordered < _LAST, ABSENT).to(torch.int32)
    return out


def index_work(q: Tensor, index_cache: Tensor, req_to_token: Tensor, *, cached: int, pairs: int) -> Work:
    """Scoring ``pairs`` of a new token and a cached one; each of the ``cached`` keys is read once."""
    key = index_cache.shape[1] * index_cache.element_size() + req_to_token.element_size()
    return Work(nbytes(q) + cached * key, 2 * q.shape[1] * q.shape[2] * pairs, "attention")


def _select_cost(scored: Scored, top_k: int) -> Work:
    cached = total_length(scored.seq_lens)
    work = index_work(scored.q, scored.index_cache, scored.req_to_token, cached=cached, pairs=cached)
    written = INT32 * top_k * scored.q.shape[0]
    return work._replace(bytes=work.bytes + nbytes(scored.weights) + written)


def _select_footprint(scored: Scored) -> tuple[Access, ...]:
    q, weights, index_cache, req_to_token, rows, seq_lens = scored
    request, position = ragged(seq_lens)
    slots = req_to_token[rows[request], position]
    return (
        *reads(q, weights, rows, seq_lens),
        Access(req_to_token, write=False, rows=rows, lens=seq_lens),
        Access(index_cache, write=False, rows=slots),
    )


@kernel(
    meta=lambda q, top_k: meta_tensor(q.shape[0], top_k, dtype=torch.int32),
    cost=_select_cost,
    footprint=_select_footprint,
    fixed_cost=False,
)
def select_top_k(scored: Scored, top_k: int, max_seq_len: int) -> Tensor:
    """The positions that each new token attends to, [b, top_k] int32, ascending, ABSENT behind them."""
    return chosen(scores(scored, max_seq_len), scored.seq_lens, top_k)


_LANE, _EPOCH, _GRID = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_GRIDS = 16  # the stretches change when a sequence has grown by a sixteenth of its length, or less


@kernel(
    meta=lambda q, top_k: meta_tensor(q.shape[0], top_k, dtype=torch.int32),
    cost=_select_cost,
    footprint=lambda seq_lens: reads(seq_lens),
    unread_floats=True,
    fixed_cost=False,
)
def select_simulated(scored: Scored, top_k: int, reuse: float) -> Tensor:
    """``select_top_k`` where floats are not computed: the cost is the same, the choice a hash of the length.

    The newest token is always chosen. The other top_k - 1 are drawn one from each of as many equal stretches of the
    sequence; at each step of a request the share 1 - ``reuse`` of them is drawn again.
    """
    seq_lens = scored.seq_lens
    length, lanes = seq_lens.unsqueeze(1), torch.arange(top_k - 1, device=seq_lens.device)
    span = _span(length, top_k - 1)
    begin, end = lanes * span // (top_k - 1), (lanes + 1) * span // (top_k - 1)
    turn = _mixed(lanes * _LANE).to(torch.float64) / float(1 << 32)
    epoch = (length * (1.0 - reuse) + turn).floor().to(torch.int64)
    drawn = begin + _mixed(lanes * _LANE + epoch * _EPOCH + span * _GRID) % (end - begin).clamp(min=1)
    rank = torch.arange(top_k, device=seq_lens.device)
    long = torch.cat([drawn, length - 1], dim=1)
    short = rank.expand_as(long).where(rank < length, ABSENT)
    return long.where(length > top_k, short).to(torch.int32)


def _span(length: Tensor, stretches: int) -> Tensor:
    """Number of tokens before the newest of ``length`` that are cut into stretches. It grows in steps, and at each step
    all tokens are drawn again."""
    quantum = torch.exp2((length.to(torch.float64) / _GRIDS).clamp(min=1).log2().floor()).to(torch.int64)
    return (length // quantum * quantum - 1).clamp(min=stretches)


def _mixed(x: Tensor) -> Tensor:
    """A hash to 32 bits (the finaliser of MurmurHash3), as int64."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


@kernel(
    meta=lambda positions: meta_tensor(*positions.shape, dtype=torch.int32),
    cost=lambda positions, req_pool_indices: Work(3 * nbytes(positions) + nbytes(req_pool_indices)),
    footprint=lambda positions, req_to_token, req_pool_indices: (
        *reads(positions, req_pool_indices),
        Access(req_to_token, write=False, rows=req_pool_indices, lens=positions.amax(1) + 1),
    ),
)
def page_lookup(positions: Tensor, req_to_token: Tensor, req_pool_indices: Tensor) -> Tensor:
    """Slots [b, k] int32 of positions [b, k] int32 of the requests in rows [b]; padding where a position is absent."""
    return entries_at(req_to_token, req_pool_indices, positions)


def _cost(q: Tensor, k_cache: Tensor, locations: Tensor, seq_lens: Tensor) -> Work:
    pairs = int(seq_lens.clamp(max=locations.shape[1]).sum())
    return attention_work(q, k_cache, slot_bytes=INT32, cached=pairs, pairs=pairs)


@kernel(
    meta=attention_output,
    cost=_cost,
    rows={"k_cache": "locations", "v_cache": "locations"},
    fixed_cost=False,
)
def sparse_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """q [b, heads, d] of one token per request → [b, heads · d]. Token i attends to the first
    min(seq_lens[i], k) of the slots ``locations[i]`` [k] int32."""
    counts = seq_lens.clamp(max=locations.shape[1])
    return _attended_to(q, k_cache, v_cache, locations, counts, scale)


def _attended_to(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor, counts: Tensor, scale: float
) -> Tensor:
    """Dense attention in which every token is a request of its own and its chosen slots are its page table."""
    rows = torch.arange(q.shape[0], device=q.device)
    paged = PagedQueries(q, k_cache, v_cache, locations, rows, counts)
    return attended(paged, torch.ones_like(counts), scale, locations.shape[1])


class SparseTokens(NamedTuple):
    """The new tokens of b requests, T in all, what they are scored by, and the cached tokens that they see."""

    q: Tensor  # [T, heads, d]
    k_cache: Tensor  # [slots, kv_heads, d]
    v_cache: Tensor  # [slots, kv_heads, d]
    index_q: Tensor  # [T, index heads, d']
    index_weights: Tensor  # [T, index heads]
    index_cache: Tensor  # [slots, d']
    req_to_token: Tensor  # [rows, context] int32
    mapping: Tensor | None  # [slots] int64, where KV lies if not in the slots of the page table
    req_pool_indices: Tensor  # [b]
    positions: Tensor  # [T]
    seq_lens: Tensor  # [b], the new tokens included
    extend_lens: Tensor  # [b]


def _extend_cost(tokens: SparseTokens, top_k: int) -> Work:
    """Two passes in one launch: all pairs are scored, then each token attends to its chosen ones."""
    seen = tokens.positions.numpy().astype("int64") + 1
    cached, pairs = int(tokens.seq_lens.sum()), int(seen.clip(max=top_k).sum())
    scored = index_work(
        tokens.index_q, tokens.index_cache, tokens.req_to_token, cached=cached, pairs=int(seen.sum())
    )
    gathered = min(cached, pairs)
    attended = attention_work(tokens.q, tokens.k_cache, slot_bytes=INT32, cached=gathered, pairs=pairs)
    return Work(scored.bytes + attended.bytes, scored.flops + attended.flops, "attention")


def _extend_footprint(tokens: SparseTokens) -> tuple[Access, ...]:
    q, k_cache, v_cache, *index, index_cache, req_to_token, mapping, rows, positions, lens, new = tokens
    request, position = ragged(lens)
    slots = req_to_token[rows[request], position].to(torch.int64)
    places = slots if mapping is None else mapping[slots]
    translated = () if mapping is None else (Access(mapping, write=False, rows=slots),)
    return (
        *reads(q, *index, rows, positions, lens, new),
        *translated,
        Access(req_to_token, write=False, rows=rows, lens=lens),
        Access(index_cache, write=False, rows=slots),
        Access(k_cache, write=False, rows=places),
        Access(v_cache, write=False, rows=places),
    )


@kernel(
    meta=attention_output,
    cost=_extend_cost,
    footprint=_extend_footprint,
    fixed_cost=False,
)
def sparse_extend(tokens: SparseTokens, scale: float, top_k: int, max_seq_len: int) -> Tensor:
    """``select_top_k`` and ``sparse_attention`` for many tokens of each request, [T, heads · d], without storing the
    chosen positions."""
    q, k_cache, v_cache, index_q, weights, index_cache, req_to_token, mapping, *_ = tokens
    lens = tokens.positions + 1
    rows = tokens.req_pool_indices.repeat_interleave(tokens.extend_lens, output_size=q.shape[0])
    scored = Scored(index_q, weights, index_cache, req_to_token, rows, lens)
    picked = chosen(scores(scored, max_seq_len), lens, top_k)
    locations = entries_at(req_to_token, rows, picked)
    if mapping is not None:
        locations = mapping[locations.to(torch.int64)].to(torch.int32)
    return _attended_to(q, k_cache, v_cache, locations, lens.clamp(max=top_k), scale)
