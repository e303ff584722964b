"""The light indexer of sparse attention: which of the cached tokens a new one attends to.

As DeepSeek's lightning indexer (V3.2, 2025): a cached token has one small key; the score of a pair is the sum over
the index heads of weight · relu(q · k). Here the keys know no positions. Ties go to the earlier token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .invariant import TILE, ceil_to, halving_sum, widened
from .registry import Access, Work, kernel
from .tiles import BLOCK, ragged

# Elements of K in the pairs of a token and a block that are scored at once.
_SLAB = 1 << 20
ABSENT = -1  # where a row of chosen positions has fewer than it could hold
_LAST = 1 << 30  # later than any position
INT32 = 4  # bytes


class Index(NamedTuple):
    """What positions of a batch's requests are scored by, and the way to it."""

    cache: torch.Tensor  # [slots, d], one key per token
    req_to_token: torch.Tensor  # [rows, context] int32
    rows: torch.Tensor  # [b], the requests' rows


class _IndexAndStore(NamedTuple):
    projected: torch.Tensor
    out_cache_loc: torch.Tensor
    index_cache: torch.Tensor
    heads: int

    def meta(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, dtype = self.projected.shape[0], self.projected.dtype
        q = nothing(rows, self.heads, self.index_cache.shape[1], dtype=dtype)
        return q, nothing(rows, self.heads, dtype=dtype)

    def cost(self) -> Work:
        return Work(2 * nbytes(self.projected) + nbytes(self.out_cache_loc))

    def footprint(self) -> tuple[Access, ...]:
        written = Access(self.index_cache, write=True, rows=self.out_cache_loc)
        return (*reads(self.projected, self.out_cache_loc), written)


@kernel(
    "index_and_store(Tensor projected, Tensor out_cache_loc, Tensor(a!) index_cache, int heads) -> (Tensor, Tensor)",
    meta=lambda *args: _IndexAndStore(*args).meta(),
    cost=lambda *args: _IndexAndStore(*args).cost(),
    footprint=lambda *args: _IndexAndStore(*args).footprint(),
    triton="indexer",
)
def index_and_store(
    projected: torch.Tensor, out_cache_loc: torch.Tensor, index_cache: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits projected [T, (heads + 1) · d + heads] into queries [T, heads, d], one key each, stored in slot
    ``out_cache_loc[t]`` of ``index_cache`` [slots, d], and the heads' weights [T, heads]."""
    d = index_cache.shape[1]
    q, k, weights = projected.split([heads * d, d, heads], dim=1)
    index_cache.index_copy_(0, out_cache_loc, k)
    return q.reshape(-1, heads, d).clone(), weights.clone()


def scores(
    q: torch.Tensor, weights: torch.Tensor, index: Index, positions: torch.Tensor, *, most: int, exact: bool
) -> torch.Tensor:
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


def _score(
    q: torch.Tensor,
    weights: torch.Tensor,
    index: Index,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    exact: bool,
) -> None:
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


def chosen(scored: torch.Tensor, lens: torch.Tensor, top_k: int) -> torch.Tensor:
    """The ``top_k`` best positions of each row of scores in ascending order, [T, top_k] int32, ABSENT behind them
    where ``lens`` [T], the number of positions, is smaller."""
    width = min(top_k, scored.shape[1])
    best = scored.sort(dim=1, descending=True, stable=True).indices[:, :width]
    rank = torch.arange(width, device=scored.device)
    ordered = best.where(rank < lens.unsqueeze(1), _LAST).sort(dim=1).values
    out = torch.full((scored.shape[0], top_k), ABSENT, dtype=torch.int32, device=scored.device)
    out[:, :width] = ordered.where(ordered < _LAST, ABSENT).to(torch.int32)
    return out


def index_work(
    q: torch.Tensor, index_cache: torch.Tensor, req_to_token: torch.Tensor, *, cached: int, pairs: int
) -> Work:
    """Scoring ``pairs`` of a new token and a cached one; each of the ``cached`` keys is read once."""
    key = index_cache.shape[1] * index_cache.element_size() + req_to_token.element_size()
    return Work(nbytes(q) + cached * key, 2 * q.shape[1] * q.shape[2] * pairs, "attention")


class _SelectTopK(NamedTuple):
    q: torch.Tensor
    weights: torch.Tensor
    index_cache: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    top_k: int
    max_seq_len: int

    def meta(self) -> torch.Tensor:
        return nothing(self.q.shape[0], self.top_k, dtype=torch.int32)

    def cost(self) -> Work:
        cached = int(self.seq_lens.numpy().sum())
        work = index_work(self.q, self.index_cache, self.req_to_token, cached=cached, pairs=cached)
        written = INT32 * self.top_k * self.q.shape[0]
        return work._replace(bytes=work.bytes + nbytes(self.weights) + written)

    def footprint(self) -> tuple[Access, ...]:
        request, position = ragged(self.seq_lens, self.max_seq_len, exact=True)
        slots = self.req_to_token[self.req_pool_indices[request], position]
        return (
            *reads(self.q, self.weights, self.req_pool_indices, self.seq_lens),
            Access(self.req_to_token, write=False, rows=self.req_pool_indices, lens=self.seq_lens),
            Access(self.index_cache, write=False, rows=slots),
        )


@declared(
    "select_top_k(Tensor q, Tensor weights, Tensor index_cache, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, int top_k, int max_seq_len) -> Tensor",
    _SelectTopK,
    fixed_cost=False,
    triton="indexer",
)
def select_top_k(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    max_seq_len: int,
) -> torch.Tensor:
    """One new token per request, the last of its ``seq_lens`` [b]: the positions that it attends to, [b, top_k] int32,
    ascending, ABSENT behind them."""
    exact = q.device.type == "cpu"
    most = int(seq_lens.max()) if exact else max_seq_len
    index = Index(index_cache, req_to_token, req_pool_indices)
    scored = scores(q, weights, index, (seq_lens - 1).clamp(min=0), most=most, exact=exact)
    return chosen(scored, seq_lens, top_k)


class _SelectByLot(NamedTuple):
    q: torch.Tensor
    weights: torch.Tensor
    index_cache: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    top_k: int
    reuse: float

    def scored(self) -> _SelectTopK:
        return _SelectTopK(*self[:-1], max_seq_len=0)

    def meta(self) -> torch.Tensor:
        return self.scored().meta()

    def cost(self) -> Work:
        return self.scored().cost()

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.seq_lens)


_LANE, _EPOCH, _GRID = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_GRIDS = 16  # how finely a sequence's growth changes the stretches: by a sixteenth of its length, or less


@declared(
    "select_by_lot(Tensor q, Tensor weights, Tensor index_cache, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, int top_k, float reuse) -> Tensor",
    _SelectByLot,
    integer=True,
    fixed_cost=False,
)
def select_by_lot(
    q: torch.Tensor,  # noqa: ARG001
    weights: torch.Tensor,  # noqa: ARG001
    index_cache: torch.Tensor,  # noqa: ARG001
    req_to_token: torch.Tensor,  # noqa: ARG001
    req_pool_indices: torch.Tensor,  # noqa: ARG001
    seq_lens: torch.Tensor,
    top_k: int,
    reuse: float,
) -> torch.Tensor:
    """``select_top_k`` where there are no scores: the cost is the same, the choice a function of the length.

    The newest token is always chosen. The other top_k - 1 are drawn one from each of as many equal stretches of the
    sequence; with each step of a request the share 1 - ``reuse`` of them is drawn anew.
    """
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


def _span(length: torch.Tensor, stretches: int) -> torch.Tensor:
    """How many of the tokens before the newest of ``length`` are cut into stretches. It grows in steps: with it all of
    them are drawn anew."""
    quantum = torch.exp2((length.to(torch.float64) / _GRIDS).clamp(min=1).log2().floor()).to(torch.int64)
    return (length // quantum * quantum - 1).clamp(min=stretches)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """32 bits without structure (the finaliser of MurmurHash3), as int64."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
