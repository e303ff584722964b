"""Sparse attention: each new token attends to the positions that the indexer chose, in ascending order.

The chosen tokens' KV is gathered in that order and summed in blocks counted from the first of them, so that the result
does not depend on the slots that it is in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .attention import attention_output, attention_work
from .declare import INT32, kernel, meta_tensor, nbytes, reads
from .indexer import ABSENT, Index, chosen, index_work, scores
from .registry import Access, Work
from .tiles import Bounds, Pages, paged_attention, ragged

PADDING = 0  # the slot that stands in for an absent token


@kernel(
    meta=lambda positions: meta_tensor(*positions.shape, dtype=torch.int32),
    cost=lambda positions, req_pool_indices: Work(3 * nbytes(positions) + nbytes(req_pool_indices)),
    footprint=lambda positions, req_to_token, req_pool_indices: (
        *reads(positions, req_pool_indices),
        Access(req_to_token, write=False, rows=req_pool_indices, lens=positions.amax(1) + 1),
    ),
    integer=True,
    triton="indexer",
)
def page_lookup(positions: Tensor, req_to_token: Tensor, req_pool_indices: Tensor) -> Tensor:
    """Slots [b, k] int32 of positions [b, k] int32 of the requests in rows [b]; padding where a position is absent."""
    rows = req_pool_indices.unsqueeze(1)
    return req_to_token[rows, positions.clamp(min=0)].where(positions > ABSENT, PADDING)


def _cost(q: Tensor, k_cache: Tensor, locations: Tensor, seq_lens: Tensor) -> Work:
    pairs = int(seq_lens.clamp(max=locations.shape[1]).sum())
    return attention_work(q, k_cache, slot_bytes=INT32, cached=pairs, pairs=pairs)


def _footprint(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor, seq_lens: Tensor
) -> tuple[Access, ...]:
    slots = locations.flatten()
    return (
        *reads(q, locations, seq_lens),
        Access(k_cache, write=False, rows=slots),
        Access(v_cache, write=False, rows=slots),
    )


@kernel(meta=attention_output, cost=_cost, footprint=_footprint, fixed_cost=False, triton="attention")
def sparse_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """q [b, heads, d] of one token per request → [b, heads · d]. Token i attends to the first
    min(seq_lens[i], k) of the slots ``locations[i]`` [k] int32."""
    counts = seq_lens.clamp(max=locations.shape[1])
    return _attended(q, k_cache, v_cache, locations, counts, scale)


def _attended(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor, counts: Tensor, scale: float
) -> Tensor:
    """Dense attention in which every token is a request of its own and its chosen slots are its page table."""
    rows = torch.arange(q.shape[0], device=q.device)
    bounds = Bounds(locations.shape[1], 1, exact=q.device.type == "cpu")
    pages = Pages(k_cache, v_cache, locations, rows)
    return paged_attention(q, pages, counts, torch.ones_like(counts), bounds, scale=scale)


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


def _extend_footprint(tokens: SparseTokens, max_seq_len: int) -> tuple[Access, ...]:
    q, k_cache, v_cache, *index, index_cache, req_to_token, mapping, rows, positions, lens, new = tokens
    request, position = ragged(lens, max_seq_len, exact=True)
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
    triton="attention",
)
def sparse_extend(tokens: SparseTokens, scale: float, top_k: int, max_seq_len: int) -> Tensor:
    """``select_top_k`` and ``sparse_attention`` for many tokens of each request, [T, heads · d], without storing the
    chosen positions."""
    q, k_cache, v_cache, index_q, weights, index_cache, req_to_token, mapping, *_ = tokens
    exact, positions = q.device.type == "cpu", tokens.positions
    rows = tokens.req_pool_indices.repeat_interleave(tokens.extend_lens, output_size=q.shape[0])
    most = int(tokens.seq_lens.max()) if exact else max_seq_len
    index = Index(index_cache, req_to_token, rows)
    picked = chosen(scores(index_q, weights, index, positions, most=most, exact=exact), positions + 1, top_k)
    locations = req_to_token[rows.unsqueeze(1), picked.clamp(min=0)].where(picked > ABSENT, PADDING)
    if mapping is not None:
        locations = mapping[locations.to(torch.int64)].to(torch.int32)
    return _attended(q, k_cache, v_cache, locations, (positions + 1).clamp(max=top_k), scale)
