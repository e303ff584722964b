"""Attention of the tokens of trees: each sees its request's prefix and its own ancestors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention import attended, attending
from .declare import declared, nbytes, reads
from .registry import Access, Work
from .tiles import Bounds, Branches, Pages, paged_attention, ragged


class _TreeAttention(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    branches: torch.Tensor
    branch_lens: torch.Tensor
    scale: float
    max_seq_len: int

    def meta(self) -> torch.Tensor:
        return attended(self.q)

    def cost(self) -> Work:
        """A request's prefix is read once for all of its tree."""
        rows, seen = self.req_pool_indices.numpy(), self.seq_lens.numpy()
        prefixes = dict(zip(rows.tolist(), (seen - self.branch_lens.numpy()).tolist(), strict=True))
        cached = sum(prefixes.values()) + len(rows)
        return attending(
            self.q,
            self.k_cache,
            self.req_to_token,
            cached=cached,
            pairs=int(seen.sum()),
            more=2 * nbytes(self.branches),
        )

    def footprint(self) -> tuple[Access, ...]:
        starts = self.seq_lens - self.branch_lens
        request, position = ragged(self.seq_lens, self.max_seq_len, exact=True)
        shared = self.req_to_token[self.req_pool_indices[request], position].to(torch.int64)
        nth = position - starts[request]
        own = self.branches[request, nth.clamp(0, self.branches.shape[1] - 1)]
        slots = torch.where(nth >= 0, own, shared)
        return (
            *reads(self.q, self.req_pool_indices, self.seq_lens, self.branches, self.branch_lens),
            Access(self.req_to_token, write=False, rows=self.req_pool_indices, lens=starts),
            Access(self.k_cache, write=False, rows=slots),
            Access(self.v_cache, write=False, rows=slots),
        )


@declared(
    "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, Tensor branches, Tensor branch_lens, float scale, int max_seq_len) -> Tensor",
    _TreeAttention,
    fixed_cost=False,
    triton="attention",
)
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
    max_seq_len: int,
) -> torch.Tensor:
    """``attention`` of q [T, heads, d], each token a request of its own whose last ``branch_lens`` [T] positions are in
    ``branches`` [T, depth] instead of its row: bit for bit what a decode at that place computes."""
    pages = Pages(
        k_cache, v_cache, req_to_token, req_pool_indices, Branches(seq_lens - branch_lens, branches)
    )
    bounds = Bounds(max_seq_len, 1, exact=q.device.type == "cpu")
    return paged_attention(q, pages, seq_lens, torch.ones_like(seq_lens), bounds, scale=scale)
