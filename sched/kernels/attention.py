"""Paged causal attention with grouped queries: one kernel for extend, decode and verify."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .registry import Access, Work
from .tiles import Bounds, Pages, paged_attention


def attended(q: torch.Tensor) -> torch.Tensor:
    """The place of the result for q [T, heads, d]: [T, heads · d]."""
    num_tokens, heads, head_dim = q.shape
    return nothing(num_tokens, heads * head_dim, dtype=q.dtype)


def attending(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    cached: int,
    pairs: int,
    more: int = 0,
) -> Work:
    """The work of q [T, heads, d] on ``cached`` positions, ``pairs`` of a token and a position that it sees; ``more``
    bytes are read besides."""
    _, kv_heads, head_dim = k_cache.shape
    per_position = 2 * kv_heads * head_dim * k_cache.element_size() + req_to_token.element_size()
    flops = 4 * q.shape[1] * head_dim * pairs
    return Work(2 * nbytes(q) + more + cached * per_position, flops, "attention")


class _Attention(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    extend_lens: torch.Tensor | None
    scale: float
    max_seq_len: int
    max_extend_len: int

    def meta(self) -> torch.Tensor:
        return attended(self.q)

    def cost(self) -> Work:
        """Each position of the cache is read once; flops are those of the pairs that are not masked."""
        cached = int(self.seq_lens.numpy().sum())
        return attending(self.q, self.k_cache, self.req_to_token, cached=cached, pairs=self._pairs(cached))

    def _pairs(self, cached: int) -> int:
        """Pairs of a new token and a position it sees: of L positions, n of them new, n(2L - n + 1)/2."""
        if self.extend_lens is None:
            return cached
        new = self.extend_lens.numpy()
        return int(new @ (2 * self.seq_lens.numpy() - new + 1)) // 2

    def footprint(self) -> tuple[Access, ...]:
        longest = int(self.seq_lens.max()) if self.seq_lens.numel() else 0
        slots = self.req_to_token[:, :longest].index_select(0, self.req_pool_indices)
        return (
            *reads(self.q, self.req_pool_indices, self.seq_lens, self.extend_lens),
            Access(self.req_to_token, write=False, rows=self.req_pool_indices, lens=self.seq_lens),
            Access(self.k_cache, write=False, rows=slots, counts=self.seq_lens),
            Access(self.v_cache, write=False, rows=slots, counts=self.seq_lens),
        )


@declared(
    "attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, Tensor? extend_lens, float scale, int max_seq_len, int max_extend_len) -> Tensor",
    _Attention,
    fixed_cost=False,
    triton="attention",
)
def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor | None,
    scale: float,
    max_seq_len: int,
    max_extend_len: int,
) -> torch.Tensor:
    """q [T, heads, d] of each request's last ``extend_lens`` [b] tokens (None: one each) → [T, heads · d].

    Position p of request i is slot ``req_to_token[req_pool_indices[i], p]`` of the caches
    [slots, kv_heads, d]; token t sees the positions up to its own. The two bounds are the host's.
    """
    lens = torch.ones_like(seq_lens) if extend_lens is None else extend_lens.to(torch.int64)
    pages = Pages(k_cache, v_cache, req_to_token, req_pool_indices)
    bounds = Bounds(max_seq_len, max_extend_len, exact=q.device.type == "cpu")
    return paged_attention(q, pages, seq_lens, lens, bounds, scale=scale)
