"""Arithmetic, and attention over a paged cache, whose result for one row does not depend on the rows beside it.

A floating-point sum depends on its order, and a GEMM library chooses the order by the shape and the layout of its
operands. So every product here is a batch of tiles of one fixed shape and layout, and every sum is a tree fixed by the
positions of its terms. For attention the tokens of a request are cut into tiles of 16 rows (token, head of the group),
its cache into blocks of 64 positions counted from 0::

    positions   0        64       128      192
    cache       |block 0 |block 1 |block 2 |bl         seq_len = 200
    tokens                     |t0|t1|t2|..|t          tile t0 needs blocks 0 1 2

Each pair of a tile and a block is two products of a fixed shape; the pairs of one tile are then joined by a fixed tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiled import attention_on_host

TILE = 16  # rows of every product


def widened(x: Tensor) -> Tensor:
    """``x`` in the precision reductions are done in: float32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def tiled_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, k] x [k, m] → [rows, m]."""
    rows, k = x.shape
    tiles = ceil_to(rows, TILE) // TILE
    padded = torch.constant_pad_nd(x, (0, 0, 0, tiles * TILE - rows)).contiguous()
    product = torch.bmm(padded.view(tiles, TILE, k), weight.expand(tiles, -1, -1))
    return product.view(tiles * TILE, weight.shape[1])[:rows]


def halving_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept as 1: the second half onto the first until one is left.

    The tree depends on the width, so use it only where that is fixed.
    """
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = F.pad(x, (0, width - x.shape[-1])) if width != x.shape[-1] else x
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def pairwise_sum(x: Tensor) -> Tensor:
    """Sum over dimension 1: neighbours are added until one is left. Zeros at the end change nothing."""
    while x.shape[1] > 1:
        even, odd = x[:, 0::2], x[:, 1::2]
        x = even + (odd if odd.shape == even.shape else _with_zero(odd))
    return x[:, 0]


def _with_zero(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], dim=1)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x). torch's own uses another exponential in the tail of a vector loop than in its body."""
    return x / (1 + torch.exp(-x))


BLOCK = 64  # cache positions of one product
# Pairs of a tile and a block computed at once, times their elements of K. The host's memory stays in its cache.
HOST_SLAB, DEVICE_SLAB = 1 << 18, 1 << 24
NOTHING_SEEN = -1e30  # top of a block whose positions are all masked; its weight becomes 0


class Pages(NamedTuple):
    """The caches, and the slots of a batch's positions in them."""

    k_cache: Tensor  # [slots, kv_heads, d]
    v_cache: Tensor  # [slots, kv_heads, d]
    req_to_token: Tensor  # [rows, context] int32, slot of each position
    rows: Tensor  # [b], the requests' rows in req_to_token
    branches: Branches | None = None


class Branches(NamedTuple):
    """The last positions of each request, which are a branch of a tree and not in its row."""

    starts: Tensor  # [b], the first position of the branch
    slots: Tensor  # [b, depth] int64

    def of(self, slots: Tensor, request: Tensor, seen: Tensor) -> Tensor:
        """``slots`` [M, 64] of the positions ``seen``, corrected; ``request`` [M] are places in the batch."""
        nth = seen - self.starts[request].unsqueeze(1)
        own = self.slots[request].gather(1, nth.clamp(0, self.slots.shape[1] - 1))
        return torch.where(nth >= 0, own.to(slots.dtype), slots)


class Bounds(NamedTuple):
    """Bounds on a batch's lengths. ``exact``: the lengths may be read, since there is no device to wait for."""

    max_seq_len: int
    max_extend_len: int
    exact: bool


class Tiles(NamedTuple):
    """N tiles of S tokens each."""

    request: Tensor  # [N], index into the batch
    tokens: Tensor  # [N, S], rows of q; one past the last where the tile has no such token
    positions: Tensor  # [N, S]; 0 where the tile has no such token

    @property
    def blocks(self) -> Tensor:
        return self.positions.amax(1) // BLOCK + 1

    def slab(self, part: slice) -> Tiles:
        return Tiles(*(t[part] for t in self))


class Scratch:
    """Memory for the large intermediates of one call, reused by each slab: new pages cost more than the sums."""

    def __init__(self, like: Tensor, pairs: int) -> None:
        """``pairs`` of a tile and a block, each with kv_heads, at most."""
        self._like = like
        self._pairs = pairs
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, pairs: int, *shape: int) -> Tensor:
        """Uninitialised memory, [pairs, *shape]."""
        size = math.prod(shape)
        if name not in self._flat:
            self._flat[name] = self._like.new_empty(self._pairs * size)
        return self._flat[name][: pairs * size].view(pairs, *shape)


class Partials(NamedTuple):
    """Attention of M pairs of tile and block, R rows each."""

    top: Tensor  # [M, kv_heads, R, 1], largest score
    weight: Tensor  # [M, kv_heads, R, 1], sum of exp(score - top)
    value: Tensor  # [M, kv_heads, R, d], sum of exp(score - top) · v


def ragged(counts: Tensor, bound: int, *, exact: bool) -> tuple[Tensor, Tensor]:
    """All (i, j) with j < counts[i], in order, as two tensors.

    ``exact`` reads the counts, for which the host would wait on a device. Otherwise j runs to ``bound`` for
    every i, and the caller has to mask the surplus.
    """
    device = counts.device
    index = torch.arange(counts.shape[0], device=device)
    if not exact:
        return index.repeat_interleave(bound), torch.arange(bound, device=device).repeat(counts.shape[0])
    owner = index.repeat_interleave(counts)
    return owner, torch.arange(owner.shape[0], device=device) - (counts.cumsum(0) - counts)[owner]


def _tiles(seq_lens: Tensor, extend_lens: Tensor, bounds: Bounds, *, span: int, num_tokens: int) -> Tiles:
    """Cuts each request's new tokens into tiles of ``span``."""
    most = -(-bounds.max_extend_len // span)
    request, nth = ragged((extend_lens + span - 1) // span, most, exact=bounds.exact)
    width = min(span, bounds.max_extend_len)
    offset = (nth * span).unsqueeze(1) + torch.arange(width, device=nth.device)
    lens = extend_lens[request].unsqueeze(1)
    starts = (extend_lens.cumsum(0) - extend_lens)[request].unsqueeze(1)
    real = offset < lens
    positions = (seq_lens[request].unsqueeze(1) - lens + offset).where(real, 0).clamp_(min=0)
    return Tiles(request, (starts + offset).where(real, num_tokens), positions)


def _queries(q: Tensor, tokens: Tensor, *, kv_heads: int, scale: float) -> Tensor:
    """[N, kv_heads, 16·n, d] contiguous: a row per (token, head of the group), zeros behind them."""
    num_tokens, heads, head_dim = q.shape
    n, span = tokens.shape
    group = heads // kv_heads
    picked = q.index_select(0, tokens.clamp(max=num_tokens - 1).flatten()) * scale
    by_head = picked.view(n, span, kv_heads, group, head_dim).transpose(1, 2)
    rows = q.new_zeros(n, kv_heads, ceil_to(group, TILE), head_dim)
    rows[:, :, : span * group] = by_head.reshape(n, kv_heads, span * group, head_dim)
    return rows


def _gathered(cache: Tensor, slots: Tensor, out: Tensor) -> Tensor:
    """Slots [M, 64] of a cache [slots, kv_heads, d] → ``out`` [M · kv_heads, 64, d]."""
    _, kv_heads, head_dim = cache.shape
    index = slots.unsqueeze(1) * kv_heads + torch.arange(kv_heads, device=slots.device).unsqueeze(1)
    torch.index_select(cache.view(-1, head_dim), 0, index.flatten(), out=out.view(-1, head_dim))
    return out


def _partials(
    queries: Tensor, positions: Tensor, slots: Tensor, seen: Tensor, pages: Pages, scratch: Scratch
) -> Partials:
    """``queries`` [M, kv_heads, 16·n, d] against the 64 ``slots`` [M, 64] of one block each.

    ``positions`` [M, R] are those of the rows in use, ``seen`` [M, 64] those of the slots.
    """
    m, kv_heads, width, head_dim = queries.shape
    n, rows = m * kv_heads, positions.shape[1]
    k = _gathered(pages.k_cache, slots, scratch.take("k", n, BLOCK, head_dim))
    v = _gathered(pages.v_cache, slots, scratch.take("v", n, BLOCK, head_dim))
    # Rows of queries times K: in K times columns of queries a float64 result depends on the column's place.
    products = scratch.take("products", n, width, BLOCK)
    torch.bmm(queries.view(n, width, head_dim), k.transpose(1, 2), out=products)
    scores = widened(products[:, :rows].contiguous()).view(m, kv_heads, rows, BLOCK)
    hidden = seen.unsqueeze(1) > positions.unsqueeze(2)
    scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp_(min=NOTHING_SEEN)
    weights = scores.sub_(top).exp_()
    padded = scratch.take("padded", n, width, BLOCK)
    padded[:, :rows] = weights.view(n, rows, BLOCK)
    padded[:, rows:] = 0
    value = widened(torch.bmm(padded, v)[:, :rows]).reshape(m, kv_heads, rows, head_dim)
    return Partials(top, halving_sum(weights), value)


def _joined(partials: Partials, tile: Tensor, block: Tensor, shape: tuple[int, int]) -> Tensor:
    """Softmax over all blocks of each tile → [N, kv_heads, R, d]; ``shape`` is (N, most blocks)."""
    if shape[1] == 1:
        return partials.value / partials.weight
    top, weight, value = (
        torch.full((*shape, *part.shape[1:]), empty, dtype=part.dtype, device=part.device).index_put_(
            (tile, block), part
        )
        for part, empty in zip(partials, (NOTHING_SEEN, 0.0, 0.0), strict=True)
    )
    share = torch.exp(top - top.amax(1, keepdim=True))
    return pairwise_sum(value * share) / pairwise_sum(weight * share)


def _attend(
    q: Tensor, tiles: Tiles, pages: Pages, scratch: Scratch, *, scale: float, most_blocks: int, exact: bool
) -> Tensor:
    """The tiles' rows of the result, [N · S, heads · d]."""
    context = pages.req_to_token.shape[1]
    kv_heads = pages.k_cache.shape[1]
    group = q.shape[1] // kv_heads
    tile, block = ragged(tiles.blocks, most_blocks, exact=exact)
    seen = (block * BLOCK).unsqueeze(1) + torch.arange(BLOCK, device=block.device)
    last = tiles.positions.amax(1)[tile].unsqueeze(1)
    row = pages.rows[tiles.request[tile]].unsqueeze(1)
    slots = pages.req_to_token[row, seen.clamp(max=context - 1)]
    if pages.branches is not None:
        slots = pages.branches.of(slots, tiles.request[tile], seen)
    slots = slots.where(seen <= last, 0)
    positions = tiles.positions.repeat_interleave(group, dim=1)[tile]
    queries = _queries(q, tiles.tokens, kv_heads=kv_heads, scale=scale)[tile]
    partials = _partials(queries, positions, slots, seen, pages, scratch)
    n, span = tiles.tokens.shape
    out = _joined(partials, tile, block, (n, most_blocks)).view(n, kv_heads, span, group, q.shape[2])
    return out.permute(0, 2, 1, 3, 4).reshape(n * span, -1)


def _slabs(blocks: Sequence[int], capacity: int) -> Iterator[slice]:
    """Cuts tiles into runs with at most ``capacity`` blocks, or one tile."""
    start = total = 0
    for index, count in enumerate(blocks):
        if total and total + count > capacity:
            yield slice(start, index)
            start, total = index, 0
        total += count
    if total:
        yield slice(start, len(blocks))


def paged_attention(
    q: Tensor, pages: Pages, seq_lens: Tensor, extend_lens: Tensor, bounds: Bounds, *, scale: float
) -> Tensor:
    """q [T, heads, d] of the last ``extend_lens`` [b] of ``seq_lens`` [b] positions → [T, heads · d]."""
    compiled = attention_on_host(q, *pages, seq_lens, extend_lens, scale) if bounds.exact else None
    if compiled is not None:
        return compiled
    num_tokens, heads, head_dim = q.shape
    kv_heads = pages.k_cache.shape[1]
    span = max(1, TILE * kv_heads // heads)
    tiles = _tiles(seq_lens, extend_lens, bounds, span=span, num_tokens=num_tokens)
    most = -(-bounds.max_seq_len // BLOCK)
    blocks = tiles.blocks.tolist() if bounds.exact else [most] * tiles.request.shape[0]
    capacity = (HOST_SLAB if bounds.exact else DEVICE_SLAB) // (BLOCK * kv_heads * head_dim)
    capacity = min(sum(blocks), max(capacity, *blocks, 1))
    scratch = Scratch(q, capacity * kv_heads)
    out = q.new_zeros(num_tokens + 1, heads * head_dim)  # the last row takes entries that are no token
    for slab in _slabs(blocks, capacity):
        part = tiles.slab(slab)
        rows = _attend(
            q, part, pages, scratch, scale=scale, most_blocks=max(blocks[slab]), exact=bounds.exact
        )
        out.index_copy_(0, part.tokens.flatten(), rows.to(q.dtype))
    return out[:num_tokens]
