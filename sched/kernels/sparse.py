"""Sparse attention: each new token attends to the positions that the indexer chose, in the order of the tokens.

Wherever the chosen tokens' KV lies, it is gathered in that order and summed in blocks counted from the first of them,
so that the result does not depend on the place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attention_output, attention_work
from .declare import INT32, kernel, meta_tensor, nbytes, reads
from .indexer import ABSENT, Index, chosen, index_work, scores
from .registry import Access, Work
from .tiles import Bounds, Pages, paged_attention, ragged

PADDING = 0  # the slot that stands where there is no token


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
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    locations: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """q [b, heads, d] of one token per request → [b, heads · d]. Token i attends to the first
    min(seq_lens[i], k) of the slots ``locations[i]`` [k] int32."""
    counts = seq_lens.clamp(max=locations.shape[1])
    return _attended(q, k_cache, v_cache, locations, counts, scale)


def _attended(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    locations: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """Every token is a request of its own to dense attention, and its chosen slots are its page table."""
    rows = torch.arange(q.shape[0], device=q.device)
    bounds = Bounds(locations.shape[1], 1, exact=q.device.type == "cpu")
    pages = Pages(k_cache, v_cache, locations, rows)
    return paged_attention(q, pages, counts, torch.ones_like(counts), bounds, scale=scale)


def _extend_cost(
    q: Tensor,
    k_cache: Tensor,
    index_q: Tensor,
    index_cache: Tensor,
    req_to_token: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    top_k: int,
) -> Work:
    """Two passes in one launch: all pairs are scored, then each token attends to its chosen ones."""
    seen = positions.numpy().astype("int64") + 1
    cached, pairs = int(seq_lens.sum()), int(seen.clip(max=top_k).sum())
    scored = index_work(index_q, index_cache, req_to_token, cached=cached, pairs=int(seen.sum()))
    attended = attention_work(q, k_cache, slot_bytes=INT32, cached=min(cached, pairs), pairs=pairs)
    return Work(scored.bytes + attended.bytes, scored.flops + attended.flops, "attention")


def _extend_footprint(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index_q: Tensor,
    index_weights: Tensor,
    index_cache: Tensor,
    req_to_token: Tensor,
    mapping: Tensor | None,
    req_pool_indices: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    max_seq_len: int,
) -> tuple[Access, ...]:
    request, position = ragged(seq_lens, max_seq_len, exact=True)
    slots = req_to_token[req_pool_indices[request], position].to(torch.int64)
    places = slots if mapping is None else mapping[slots]
    translated = () if mapping is None else (Access(mapping, write=False, rows=slots),)
    return (
        *reads(q, index_q, index_weights, req_pool_indices, positions, seq_lens, extend_lens),
        *translated,
        Access(req_to_token, write=False, rows=req_pool_indices, lens=seq_lens),
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
def sparse_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index_q: Tensor,
    index_weights: Tensor,
    index_cache: Tensor,
    req_to_token: Tensor,
    mapping: Tensor | None,
    req_pool_indices: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    scale: float,
    top_k: int,
    max_seq_len: int,
) -> Tensor:
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
