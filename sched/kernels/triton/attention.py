"""Dense attention, a tree's and that to chosen tokens, by the two ways there are."""

from __future__ import annotations

import torch

from .decode import decode_attention
from .extend import extend_attention
from .indexer import Scored, chosen, located


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor | None,
    scale: float,
    max_seq_len: int,  # noqa: ARG001
    max_extend_len: int,
) -> torch.Tensor:
    where = (q, (k_cache, v_cache), req_to_token, req_pool_indices, seq_lens)
    if extend_lens is None:
        return decode_attention(*where, scale=scale)
    return extend_attention(*where, extend_lens, scale=scale, max_extend_len=max_extend_len)


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    branches: torch.Tensor,
    branch_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,  # noqa: ARG001
) -> torch.Tensor:
    where = (q, (k_cache, v_cache), req_to_token, req_pool_indices, seq_lens)
    return decode_attention(*where, scale=scale, branches=(branches, branch_lens))


def sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    locations: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return decode_attention(q, (k_cache, v_cache), locations, None, seq_lens, scale=scale)


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
    seq_lens: torch.Tensor,  # noqa: ARG001
    extend_lens: torch.Tensor,
    scale: float,
    top_k: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Every token is a request of its own, as in a decode."""
    rows = req_pool_indices.repeat_interleave(extend_lens, output_size=q.shape[0])
    scored = Scored(index_q, index_weights, index_cache, req_to_token, rows, positions + 1)
    locations = located(chosen(scored, top_k, max_seq_len), req_to_token, rows, mapping)
    return decode_attention(q, (k_cache, v_cache), locations, None, positions + 1, scale=scale)
