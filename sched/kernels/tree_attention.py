"""Attention of the tokens of a draft tree: each attends to its request's prefix and to its own ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import PagedQueries, attention_output, attention_work
from .declare import kernel, nbytes, reads
from .registry import Access, Work
from .tiles import Bounds, Branches, Pages, paged_attention, ragged


def _cost(paged: PagedQueries, branches: Tensor, branch_lens: Tensor) -> Work:
    """A request's prefix is read once for all of its tree."""
    rows, seen = paged.req_pool_indices.numpy(), paged.seq_lens.numpy()
    prefixes = dict(zip(rows.tolist(), (seen - branch_lens.numpy()).tolist(), strict=True))
    return attention_work(
        paged.q,
        paged.k_cache,
        slot_bytes=paged.req_to_token.element_size(),
        cached=sum(prefixes.values()) + len(rows),
        pairs=int(seen.sum()),
        other_bytes=2 * nbytes(branches),
    )


def _footprint(
    paged: PagedQueries, branches: Tensor, branch_lens: Tensor, max_seq_len: int
) -> tuple[Access, ...]:
    q, k_cache, v_cache, req_to_token, rows, seq_lens = paged
    starts = seq_lens - branch_lens
    request, position = ragged(seq_lens, max_seq_len, exact=True)
    shared = req_to_token[rows[request], position].to(torch.int64)
    nth = position - starts[request]
    own = branches[request, nth.clamp(0, branches.shape[1] - 1)]
    slots = torch.where(nth >= 0, own, shared)
    return (
        *reads(q, rows, seq_lens, branches, branch_lens),
        Access(req_to_token, write=False, rows=rows, lens=starts),
        Access(k_cache, write=False, rows=slots),
        Access(v_cache, write=False, rows=slots),
    )


@kernel(meta=attention_output, cost=_cost, footprint=_footprint, fixed_cost=False, triton="attention")
def tree_attention(
    paged: PagedQueries, branches: Tensor, branch_lens: Tensor, scale: float, max_seq_len: int
) -> Tensor:
    """``attention`` of T tokens, each a request of its own whose last ``branch_lens`` [T] positions are in ``branches``
    [T, depth] instead of its row: bit for bit what a decode at that place computes."""
    q, k_cache, v_cache, req_to_token, rows, seq_lens = paged
    pages = Pages(k_cache, v_cache, req_to_token, rows, Branches(seq_lens - branch_lens, branches))
    bounds = Bounds(max_seq_len, 1, exact=q.device.type == "cpu")
    return paged_attention(q, pages, seq_lens, torch.ones_like(seq_lens), bounds, scale=scale)
