"""Paged causal attention with grouped queries: one kernel for extend, decode and verify, one for draft trees, and the
positions of an encoder-decoder's requests that each kind of attention reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arrays import kept_array
from .compiled import attention_on_host
from .declare import INT64, Access, Work, kernel, meta_tensor, meta_tensors, nbytes, reads, total_length
from .invariant import pairwise_sum, products, widened

SLAB = 1 << 20  # products of queries and keys that are computed at once


class PagedQueries(NamedTuple):
    """The new tokens' queries and the cache of their requests. Position p of request i is in slot
    ``req_to_token[req_pool_indices[i], p]``."""

    q: Tensor  # [T, heads, d]
    k_cache: Tensor  # [slots, kv_heads, d]
    v_cache: Tensor  # [slots, kv_heads, d]
    req_to_token: Tensor  # [rows, context] int32
    req_pool_indices: Tensor  # [b]
    seq_lens: Tensor  # [b], the new tokens included


def ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """All (i, j) with j < counts[i], in order, as two tensors. The counts are read."""
    owner = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)
    return owner, torch.arange(owner.shape[0], device=counts.device) - (counts.cumsum(0) - counts)[owner]


def positions_up_to(seq_lens: Tensor, bound: int, req_to_token: Tensor) -> Tensor:
    """0, 1, ... up to the longest of a batch's lengths; on a device, which the host does not wait for, up to the bound
    on them."""
    longest = int(seq_lens.max()) if seq_lens.device.type == "cpu" else bound
    return torch.arange(min(max(longest, 1), req_to_token.shape[1]), device=seq_lens.device)


def with_branches(paged: PagedQueries, branches: Tensor, starts: Tensor, max_seq_len: int) -> PagedQueries:
    """Every request with a row of its own, which continues with its ``branches`` [b, depth] from ``starts`` [b] on."""
    seen = positions_up_to(paged.seq_lens, max_seq_len, paged.req_to_token)
    nth = seen - starts.unsqueeze(1)
    slots = paged.req_to_token[paged.req_pool_indices, : seen.shape[0]]
    own = branches.gather(1, nth.clamp(0, branches.shape[1] - 1)).to(slots.dtype)
    rows = torch.arange(starts.shape[0], device=starts.device)
    return paged._replace(req_to_token=torch.where(nth >= 0, own, slots), req_pool_indices=rows)


def attended(paged: PagedQueries, extend_lens: Tensor, scale: float, max_seq_len: int) -> Tensor:
    """Attention of each request's last ``extend_lens`` [b] int64 tokens → [T, heads · d]. What a token gets depends on
    its query and the KV at the positions up to its own, and on nothing else."""
    q, k_cache, v_cache, req_to_token, rows, seq_lens = paged
    compiled = attention_on_host(paged, extend_lens, scale) if q.device.type == "cpu" else None
    if compiled is not None:
        return compiled
    out = torch.empty_like(q).flatten(1)
    if not out.shape[0]:
        return out
    seen = positions_up_to(seq_lens, max_seq_len, req_to_token)
    heads, head_dim = q.shape[1:]
    ends, token = extend_lens.cumsum(0), torch.arange(q.shape[0], device=q.device)
    request = torch.searchsorted(ends, token, right=True).clamp_(max=rows.shape[0] - 1)  # padding of a graph
    positions = ((seq_lens - ends)[request] + token).clamp_(min=0)
    for tokens in token.split(max(1, SLAB // (seen.shape[0] * heads * head_dim))):
        hidden, owners = seen > positions[tokens].unsqueeze(1), request[tokens]
        unread = hidden
        if q.device.type == "cpu" and owners[0] == owners[-1]:
            owners, unread = owners[-1:], hidden[-1:]  # one request's row, of which its last token sees most
        slots = req_to_token[rows[owners], : seen.shape[0]].where(~unread, 0)
        k, v = (widened(cache[slots]).transpose(1, 2).unsqueeze(2) for cache in (k_cache, v_cache))
        queries = widened(q[tokens] * scale).view(
            -1, k_cache.shape[1], heads // k_cache.shape[1], 1, head_dim
        )
        # [tokens, kv_heads, heads of each, positions], of which torch adds the last dimension's at once.
        scores = products(queries, k).masked_fill_(hidden.unsqueeze(1).unsqueeze(2), -torch.inf)
        shares = torch.exp(scores - scores.amax(3, keepdim=True)).unsqueeze(4)
        value, weight = (pairwise_sum(x.movedim(3, 1)) for x in (shares * v, shares))
        out[tokens] = (value / weight).flatten(1).to(q.dtype)
    return out


def attention_output(q: Tensor) -> Tensor:
    """[T, heads · d] on the meta device, for q [T, heads, d]."""
    num_tokens, heads, head_dim = q.shape
    return meta_tensor(num_tokens, heads * head_dim, dtype=q.dtype)


def attention_work(
    q: Tensor, k_cache: Tensor, *, slot_bytes: int, cached: int, pairs: int, other_bytes: int = 0
) -> Work:
    """The work of q [T, heads, d] on ``cached`` positions of both caches, each found by an entry of
    ``slot_bytes``, and on ``pairs`` of a token and a position that it attends to."""
    _, kv_heads, head_dim = k_cache.shape
    per_position = 2 * kv_heads * head_dim * k_cache.element_size() + slot_bytes
    flops = 4 * q.shape[1] * head_dim * pairs
    return Work(2 * nbytes(q) + other_bytes + cached * per_position, flops, "attention")


def _cost(paged: PagedQueries, extend_lens: Tensor | None) -> Work:
    """Each position of the cache is read once. The flops are those of the pairs that are not masked: of L positions,
    n of them new, these are n(2L - n + 1)/2."""
    cached = pairs = total_length(paged.seq_lens)
    if extend_lens is not None:
        new = kept_array(extend_lens)
        pairs = int(new @ (2 * kept_array(paged.seq_lens) - new + 1)) // 2
    slot_bytes = paged.req_to_token.element_size()
    return attention_work(paged.q, paged.k_cache, slot_bytes=slot_bytes, cached=cached, pairs=pairs)


def _footprint(paged: PagedQueries, extend_lens: Tensor | None) -> tuple[Access, ...]:
    q, k_cache, v_cache, req_to_token, rows, seq_lens = paged
    return (
        *reads(q, rows, seq_lens, extend_lens),
        Access(req_to_token, write=False, rows=rows, lens=seq_lens),
        Access(k_cache, write=False, rows=rows, lens=seq_lens, table=req_to_token),
        Access(v_cache, write=False, rows=rows, lens=seq_lens, table=req_to_token),
    )


@kernel(meta=attention_output, cost=_cost, footprint=_footprint, fixed_cost=False)
def attention(
    paged: PagedQueries,
    extend_lens: Tensor | None,
    scale: float,
    max_seq_len: int,
    max_extend_len: int,  # noqa: ARG001 - the kernel of CUDA needs it
) -> Tensor:
    """Attention of each request's last ``extend_lens`` [b] tokens (None: one each) → [T, heads · d].

    A token attends to the positions up to its own. The host knows the two bounds without reading the lengths.
    """
    lens = torch.ones_like(paged.seq_lens) if extend_lens is None else extend_lens.to(torch.int64)
    return attended(paged, lens, scale, max_seq_len)


def _tree_cost(paged: PagedQueries, branches: Tensor, branch_lens: Tensor) -> Work:
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


def _tree_footprint(paged: PagedQueries, branches: Tensor, branch_lens: Tensor) -> tuple[Access, ...]:
    q, k_cache, v_cache, req_to_token, rows, seq_lens = paged
    starts = seq_lens - branch_lens
    request, position = ragged(seq_lens)
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


@kernel(meta=attention_output, cost=_tree_cost, footprint=_tree_footprint, fixed_cost=False)
def tree_attention(
    paged: PagedQueries, branches: Tensor, branch_lens: Tensor, scale: float, max_seq_len: int
) -> Tensor:
    """``attention`` of T tokens, each a request of its own whose last ``branch_lens`` [T] positions are in ``branches``
    [T, depth] instead of its row: bit for bit what a decode at that place computes."""
    own = with_branches(paged, branches, paged.seq_lens - branch_lens, max_seq_len)
    return attended(own, torch.ones_like(paged.seq_lens), scale, max_seq_len)


@kernel(
    meta=lambda req_to_token, seq_lens, max_seq_len: (
        meta_tensor(seq_lens.shape[0], max_seq_len, dtype=req_to_token.dtype),
        *meta_tensors(2, seq_lens.shape[0]),
    ),
    cost=lambda req_to_token, req_pool_indices, seq_lens: Work(
        2 * req_to_token.element_size() * total_length(seq_lens)
        + nbytes(req_pool_indices, seq_lens)
        + 3 * INT64 * seq_lens.shape[0]
    ),
    rows={"req_to_token": "req_pool_indices, seq_lens", "encoder_lens": "req_pool_indices"},
    fixed_cost=False,
)
def decoder_pages(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor, max_seq_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of each request's decoder tokens [b, max_seq_len], which follow those of its encoder in its row of
    ``req_to_token`` [rows, context], and the number of its decoder and of its encoder tokens, [b] int64 each.
    ``encoder_lens`` [rows] is by request slot; ``seq_lens`` [b] counts both kinds."""
    encoder = encoder_lens[req_pool_indices]
    decoder = (seq_lens - encoder).clamp_(min=1)  # padding rows of a graph
    if req_to_token.device.type != "cpu":
        places = encoder.unsqueeze(1) + torch.arange(max_seq_len, device=seq_lens.device)
        return (
            req_to_token[req_pool_indices].gather(1, places.clamp_(max=req_to_token.shape[1] - 1)),
            decoder,
            encoder,
        )
    pages = req_to_token.new_zeros(seq_lens.shape[0], max_seq_len)
    rows = zip(req_pool_indices.tolist(), encoder.tolist(), decoder.tolist(), strict=True)
    for place, (row, start, count) in enumerate(rows):
        pages[place, :count] = req_to_token[row, start : start + count]
    return pages, decoder, encoder
