"""Sparse attention: each new token attends to the positions that the indexer chose, in the order of the tokens.

Wherever the chosen tokens' KV lies, it is gathered in that order and summed in blocks counted from the first of them,
so that the result does not depend on the place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .indexer import ABSENT, INT32, Index, chosen, index_work, scores
from .registry import Access, Work
from .tiles import Bounds, Pages, paged_attention, ragged

PADDING = 0  # the slot that stands where there is no token


class _PageLookup(NamedTuple):
    positions: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor

    def meta(self) -> torch.Tensor:
        return nothing(*self.positions.shape, dtype=torch.int32)

    def cost(self) -> Work:
        return Work(3 * nbytes(self.positions) + nbytes(self.req_pool_indices))

    def footprint(self) -> tuple[Access, ...]:
        table = Access(self.req_to_token, write=False, rows=self.req_pool_indices, lens=self._reach())
        return (*reads(self.positions, self.req_pool_indices), table)

    def _reach(self) -> torch.Tensor:
        return self.positions.amax(1) + 1


@declared(
    "page_lookup(Tensor positions, Tensor req_to_token, Tensor req_pool_indices) -> Tensor",
    _PageLookup,
    integer=True,
    triton="indexer",
)
def page_lookup(
    positions: torch.Tensor, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor
) -> torch.Tensor:
    """Slots [b, k] int32 of positions [b, k] int32 of the requests in rows [b]; padding where a position is absent."""
    rows = req_pool_indices.unsqueeze(1)
    return req_to_token[rows, positions.clamp(min=0)].where(positions > ABSENT, PADDING)


class _SparseAttention(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    locations: torch.Tensor
    seq_lens: torch.Tensor
    scale: float

    def meta(self) -> torch.Tensor:
        num_tokens, heads, head_dim = self.q.shape
        return nothing(num_tokens, heads * head_dim, dtype=self.q.dtype)

    def cost(self) -> Work:
        attended = int(self.seq_lens.clamp(max=self.locations.shape[1]).sum())
        return attention_work(self.q, self.k_cache, attended, pairs=attended)

    def footprint(self) -> tuple[Access, ...]:
        slots = self.locations.flatten()
        return (
            *reads(self.q, self.locations, self.seq_lens),
            Access(self.k_cache, write=False, rows=slots),
            Access(self.v_cache, write=False, rows=slots),
        )


def attention_work(q: torch.Tensor, k_cache: torch.Tensor, gathered: int, *, pairs: int) -> Work:
    """Attention over ``pairs`` of a token and a chosen one, with ``gathered`` slots of both caches read."""
    _, kv_heads, head_dim = k_cache.shape
    per_position = 2 * kv_heads * head_dim * k_cache.element_size() + INT32
    return Work(2 * nbytes(q) + gathered * per_position, 4 * q.shape[1] * head_dim * pairs, "attention")


@declared(
    "sparse_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor locations, Tensor seq_lens, float scale) "
    "-> Tensor",
    _SparseAttention,
    fixed_cost=False,
    triton="attention",
)
def sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    locations: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [b, heads, d] of one token per request → [b, heads · d]. Token i attends to the first
    min(seq_lens[i], k) of the slots ``locations[i]`` [k] int32."""
    counts = seq_lens.clamp(max=locations.shape[1])
    return _attended(q, k_cache, v_cache, locations, counts, scale)


def _attended(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    locations: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Every token is a request of its own to dense attention, and its chosen slots are its page table."""
    rows = torch.arange(q.shape[0], device=q.device)
    bounds = Bounds(locations.shape[1], 1, exact=q.device.type == "cpu")
    pages = Pages(k_cache, v_cache, locations, rows)
    return paged_attention(q, pages, counts, torch.ones_like(counts), bounds, scale=scale)


class _SparseExtend(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor
    index_cache: torch.Tensor
    req_to_token: torch.Tensor
    mapping: torch.Tensor | None
    req_pool_indices: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    extend_lens: torch.Tensor
    scale: float
    top_k: int
    max_seq_len: int

    def meta(self) -> torch.Tensor:
        num_tokens, heads, head_dim = self.q.shape
        return nothing(num_tokens, heads * head_dim, dtype=self.q.dtype)

    def cost(self) -> Work:
        """Two passes in one launch: all pairs are scored, then each token attends to its chosen ones."""
        seen = self.positions.numpy().astype("int64") + 1
        cached = int(self.seq_lens.sum())
        scored = index_work(
            self.index_q, self.index_cache, self.req_to_token, cached=cached, pairs=int(seen.sum())
        )
        pairs = int(seen.clip(max=self.top_k).sum())
        attended = attention_work(self.q, self.k_cache, min(cached, pairs), pairs=pairs)
        return Work(scored.bytes + attended.bytes, scored.flops + attended.flops, "attention")

    def footprint(self) -> tuple[Access, ...]:
        request, position = ragged(self.seq_lens, self.max_seq_len, exact=True)
        slots = self.req_to_token[self.req_pool_indices[request], position].to(torch.int64)
        places = slots if self.mapping is None else self.mapping[slots]
        translated = () if self.mapping is None else (Access(self.mapping, write=False, rows=slots),)
        return (
            *reads(self.q, self.index_q, self.index_weights, self.req_pool_indices, self.positions),
            *reads(self.seq_lens, self.extend_lens),
            *translated,
            Access(self.req_to_token, write=False, rows=self.req_pool_indices, lens=self.seq_lens),
            Access(self.index_cache, write=False, rows=slots),
            Access(self.k_cache, write=False, rows=places),
            Access(self.v_cache, write=False, rows=places),
        )


@declared(
    "sparse_extend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor index_q, Tensor index_weights, "
    "Tensor index_cache, Tensor req_to_token, Tensor? mapping, Tensor req_pool_indices, Tensor positions, "
    "Tensor seq_lens, Tensor extend_lens, float scale, int top_k, int max_seq_len) -> Tensor",
    _SparseExtend,
    fixed_cost=False,
    triton="attention",
)
def sparse_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    index_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    mapping: torch.Tensor | None,
    req_pool_indices: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    scale: float,
    top_k: int,
    max_seq_len: int,
) -> torch.Tensor:
    """``select_top_k`` and ``sparse_attention`` for many tokens of each request, [T, heads · d], without leaving the
    chosen positions behind.

    Index queries are [T, index heads, d'], ``positions`` [T]. KV lies in the slots of the page table, or where
    ``mapping`` [slots] says that it lies instead.
    """
    exact = q.device.type == "cpu"
    rows = req_pool_indices.repeat_interleave(extend_lens, output_size=q.shape[0])
    most = int(seq_lens.max()) if exact else max_seq_len
    scored = scores(
        index_q, index_weights, Index(index_cache, req_to_token, rows), positions, most=most, exact=exact
    )
    picked = chosen(scored, positions + 1, top_k)
    locations = req_to_token[rows.unsqueeze(1), picked.clamp(min=0)].where(picked > ABSENT, PADDING)
    if mapping is not None:
        locations = mapping[locations.to(torch.int64)].to(torch.int32)
    return _attended(q, k_cache, v_cache, locations, (positions + 1).clamp(max=top_k), scale)
