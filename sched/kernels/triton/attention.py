"""Dense, tree and sparse attention, each by the decode kernel or the extend kernel."""

from __future__ import annotations

from torch import Tensor

from ..attention import PagedQueries
from ..indexer import Scored
from ..sparse import SparseTokens
from .decode import decode_attention
from .extend import extend_attention
from .indexer import chosen, located


def attention(paged: PagedQueries, extend_lens: Tensor | None, scale: float, max_extend_len: int) -> Tensor:
    q, *caches, req_to_token, rows, seq_lens = paged
    if extend_lens is None:
        return decode_attention(q, caches, req_to_token, rows, seq_lens, scale=scale)
    return extend_attention(paged, extend_lens, scale=scale, max_extend_len=max_extend_len)


def tree_attention(paged: PagedQueries, branches: Tensor, branch_lens: Tensor, scale: float) -> Tensor:
    q, *caches, req_to_token, rows, seq_lens = paged
    tree = (branches, branch_lens)
    return decode_attention(q, caches, req_to_token, rows, seq_lens, scale=scale, branches=tree)


def sparse_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    return decode_attention(q, (k_cache, v_cache), locations, None, seq_lens, scale=scale)


def sparse_extend(tokens: SparseTokens, scale: float, top_k: int, max_seq_len: int) -> Tensor:
    """Every token is a request of its own, as in a decode."""
    q, *caches, index_q, index_weights, index_cache, req_to_token, mapping, rows, positions, _, new = tokens
    rows = rows.repeat_interleave(new, output_size=q.shape[0])
    scored = Scored(index_q, index_weights, index_cache, req_to_token, rows, positions + 1)
    locations = located(chosen(scored, top_k, max_seq_len), req_to_token, rows, mapping)
    return decode_attention(q, caches, locations, None, positions + 1, scale=scale)
