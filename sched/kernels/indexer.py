"""The indexer of sparse attention, which selects the cached tokens that a new token attends to.

As DeepSeek's lightning indexer (V3.2, 2025): a cached token has one small key; the score of a pair is the sum over
the index heads of weight · relu(q · k). Here the keys know no positions. Ties go to the earlier token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .declare import INT32, kernel, meta_tensor, nbytes, reads, total_length
from .invariant import TILE, ceil_to, halving_sum, widened
from .registry import Access, Work
from .tiles import BLOCK, ragged

# Elements of K in the pairs of a token and a block that are scored at once.
_SLAB = 1 << 20
ABSENT = -1  # fills a row that has fewer chosen positions than its width
_LAST = 1 << 30  # later than any position


class Index(NamedTuple):
    """The keys that cached tokens are scored by, and where those of a batch's requests are."""

    cache: Tensor  # [slots, d], one key per token
    req_to_token: Tensor  # [rows, context] int32
    rows: Tensor  # [b], the requests' rows


class Scored(NamedTuple):
    """A new token of each of b requests, and the cached tokens that it is compared with."""

    q: Tensor  # [b, heads, d]
    weights: Tensor  # [b, heads]
    index_cache: Tensor  # [slots, d], one key per token
    req_to_token: Tensor  # [rows, context] int32
    req_pool_indices: Tensor  # [b]
    seq_lens: Tensor  # [b], the new token included


def _store_meta(projected: Tensor, index_cache: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    rows, dtype = projected.shape[0], projected.dtype
    q = meta_tensor(rows, heads, index_cache.shape[1], dtype=dtype)
    return q, meta_tensor(rows, heads, dtype=dtype)


@kernel(
    mutates=("index_cache",),
    meta=_store_meta,
    cost=lambda projected, out_cache_loc: Work(2 * nbytes(projected) + nbytes(out_cache_loc)),
    footprint=lambda projected, out_cache_loc, index_cache: (
        *reads(projected, out_cache_loc),
        Access(index_cache, write=True, rows=out_cache_loc),
    ),
    triton="indexer",
)
def index_and_store(
    projected: Tensor, out_cache_loc: Tensor, index_cache: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Splits projected [T, (heads + 1) · d + heads] into queries [T, heads, d], one key each, stored in slot
    ``out_cache_loc[t]`` of ``index_cache`` [slots, d], and the heads' weights [T, heads]."""
    d = index_cache.shape[1]
    q, k, weights = projected.split([heads * d, d, heads], dim=1)
    index_cache.index_copy_(0, out_cache_loc, k)
    return q.reshape(-1, heads, d).clone(), weights.clone()


def scores(q: Tensor, weights: Tensor, index: Index, positions: Tensor, *, most: int, exact: bool) -> Tensor:
    """[T, at least ``most``] scores of all positions up to each token's own, -inf behind it.

    q [T, heads, d], weights [T, heads]; ``index.rows`` and ``positions`` are [T] here; ``most`` is a bound on
    positions + 1. A score is made of products of one fixed shape, whatever else is in the batch.
    """
    blocks = max(1, -(-most // BLOCK))
    out = torch.full((q.shape[0], blocks * BLOCK), float("-inf"), dtype=widened(q[:0]).dtype, device=q.device)
    per_slab = max(1, _SLAB // (blocks * BLOCK * q.shape[2]))
    for start in range(0, q.shape[0], per_slab):
        part = slice(start, start + per_slab)
        here = Index(index.cache, index.req_to_token, index.rows[part])
        _score(q[part], weights[part], here, positions[part], out[part].view(-1, blocks, BLOCK), exact=exact)
    return out


def _score(q: Tensor, weights: Tensor, index: Index, positions: Tensor, out: Tensor, *, exact: bool) -> None:
    """Writes [T, blocks, 64] scores."""
    tokens, heads, d = q.shape
    token, block = ragged(positions // BLOCK + 1, out.shape[1], exact=exact)
    seen = (block * BLOCK).unsqueeze(1) + torch.arange(BLOCK, device=q.device)
    hidden = seen > positions[token].unsqueeze(1)
    context = index.req_to_token.shape[1]
    slots = index.req_to_token[index.rows[token].unsqueeze(1), seen.clamp(max=context - 1)].where(~hidden, 0)
    keys = index.cache.index_select(0, slots.flatten()).view(-1, BLOCK, d)
    tiles = q.new_zeros(tokens, ceil_to(heads, TILE), d)
    tiles[:, :heads] = q
    products = torch.bmm(tiles[token], keys.transpose(1, 2))[:, :heads]
    weighted = widened(products).clamp(min=0) * widened(weights)[token].unsqueeze(2)
    summed = halving_sum(weighted.transpose(1, 2).contiguous()).squeeze(2)
    out[token, block] = summed.masked_fill(hidden, float("-inf"))


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


def _select_footprint(scored: Scored, max_seq_len: int) -> tuple[Access, ...]:
    q, weights, index_cache, req_to_token, rows, seq_lens = scored
    request, position = ragged(seq_lens, max_seq_len, exact=True)
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
    triton="indexer",
)
def select_top_k(scored: Scored, top_k: int, max_seq_len: int) -> Tensor:
    """The positions that each new token attends to, [b, top_k] int32, ascending, ABSENT behind them."""
    q, weights, index_cache, req_to_token, rows, seq_lens = scored
    exact = q.device.type == "cpu"
    most = int(seq_lens.max()) if exact else max_seq_len
    index = Index(index_cache, req_to_token, rows)
    found = scores(q, weights, index, (seq_lens - 1).clamp(min=0), most=most, exact=exact)
    return chosen(found, seq_lens, top_k)


_LANE, _EPOCH, _GRID = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_GRIDS = 16  # the stretches change when a sequence has grown by a sixteenth of its length, or less


@kernel(
    meta=lambda q, top_k: meta_tensor(q.shape[0], top_k, dtype=torch.int32),
    cost=_select_cost,
    footprint=lambda seq_lens: reads(seq_lens),
    integer=True,
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
