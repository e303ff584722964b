"""Kernels of verification: the tree of drafts, the path that the target accepts, and simulated acceptance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .declare import INT32, INT64, kernel, meta_tensor, nbytes, reads
from .registry import Access, Work
from .sampling import GOLDEN64, mix64

NONE = -1  # no node, no token
# The token that a simulated verify predicts (upstream's value, too); it has no meaning.
SIMULATED_TOKEN = 100


def _tree_meta(tokens: Tensor, draft_tokens: int) -> tuple[Tensor, Tensor]:
    b = tokens.shape[0]
    return meta_tensor(b, draft_tokens), meta_tensor(b, draft_tokens)


def _tree_cost(scores: Tensor, tokens: Tensor, parents: Tensor, bonus: Tensor, draft_tokens: int) -> Work:
    return Work(nbytes(scores, tokens, parents, bonus) + 2 * INT64 * tokens.shape[0] * draft_tokens)


@kernel(meta=_tree_meta, cost=_tree_cost, triton="verify")
def build_tree(
    scores: Tensor, tokens: Tensor, parents: Tensor, bonus: Tensor, draft_tokens: int
) -> tuple[Tensor, Tensor]:
    """Builds a tree of the root ``bonus`` [b] and the best ``draft_tokens - 1`` of n candidates.

    ``scores`` [b, n] float32 never grow from a candidate to its children. ``parents`` [b, n] int64 are candidates
    (NONE for the root's children) and come before their children. Returns tokens [b, d] and parents [b, d] as
    nodes: the root is node 0, its own parent NONE.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : draft_tokens - 1].sort(dim=1).values
    place = torch.zeros_like(parents).scatter_(
        1, chosen, torch.arange(1, draft_tokens, device=chosen.device).expand_as(chosen)
    )
    above = parents.gather(1, chosen)
    nodes = torch.where(above < 0, 0, place.gather(1, above.clamp(min=0)))
    return (
        torch.cat([bonus.unsqueeze(1), tokens.gather(1, chosen)], 1),
        torch.cat([torch.full_like(bonus, NONE).unsqueeze(1), nodes], 1),
    )


@kernel(
    meta=lambda parents, depth: (meta_tensor(*parents.shape, depth), meta_tensor(*parents.shape)),
    cost=lambda parents, depth: Work(nbytes(parents) * (2 + depth)),
    integer=True,
    triton="verify",
)
def tree_paths(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """For each node of ``parents`` [b, d]: the path from the root to itself, [b, d, depth] int64, NONE after it, and
    the path's length, [b, d] int64."""
    b, d = parents.shape
    node = torch.arange(d, device=parents.device).expand(b, d)
    upward = []
    for _ in range(depth):  # from the node up
        upward.append(node)
        node = torch.where(node > 0, parents.gather(1, node.clamp(min=0)), NONE)
    line = torch.stack(upward, 2)
    count = (line >= 0).sum(2)
    index = count.unsqueeze(2) - 1 - torch.arange(depth, device=parents.device)
    downward = line.gather(2, index.clamp(min=0))
    return torch.where(index >= 0, downward, NONE), count


@kernel(
    meta=lambda parents: (meta_tensor(*parents.shape), meta_tensor(*parents.shape)),
    cost=lambda parents: Work(3 * nbytes(parents)),
    integer=True,
)
def tree_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Each node's first child and next sibling, [b, d] int64 each, NONE where there is none."""
    d = parents.shape[1]
    node = torch.arange(d, device=parents.device)
    child = parents.unsqueeze(1) == node.unsqueeze(1)  # [b, parent, node]
    sibling = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (node > node.unsqueeze(1))
    first, following = (
        torch.where(found.any(2), found.to(torch.int8).argmax(2), NONE) for found in (child, sibling)
    )
    return first, following


def _accepted_meta(requests: Tensor, most: int) -> tuple[Tensor, Tensor]:
    b = requests.shape[0]
    return meta_tensor(b, most, dtype=torch.int32), meta_tensor(b, dtype=torch.int32)


def _accept_cost(tokens: Tensor, parents: Tensor | None, predict: Tensor, most: int) -> Work:
    return Work(nbytes(tokens, parents, predict) + INT32 * tokens.shape[0] * (most + 1))


@kernel(
    meta=lambda tokens, most: _accepted_meta(tokens, most), cost=_accept_cost, integer=True, triton="verify"
)
def accept_drafts(
    tokens: Tensor, parents: Tensor | None, predict: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Walks from the root along drafts that equal the target's prediction at their parent.

    ``tokens`` [b, d], ``parents`` [b, d] (None for a chain), ``predict`` [b · d] the target's next token after each
    node. Returns the nodes walked, as indices into the b · d, [b, most] int32 with NONE after the last, and their
    number, [b] int32. The target's prediction at each of them is accepted; that at the last one is the next bonus.
    """
    b, d = tokens.shape
    predict = predict.view(b, d)
    if parents is None:
        parents = (torch.arange(d, device=tokens.device) - 1).expand(b, d)
    base = torch.arange(b, device=tokens.device) * d
    node = torch.zeros_like(base)
    walked = [base]
    for _ in range(most - 1):
        wanted = predict.gather(1, node.clamp(min=0).unsqueeze(1))
        fits = (parents == node.unsqueeze(1)) & (tokens == wanted) & (node >= 0).unsqueeze(1)
        node = torch.where(fits.any(1), fits.to(torch.int8).argmax(1), NONE)
        walked.append(torch.where(node >= 0, base + node, NONE))
    index = torch.stack(walked, 1).to(torch.int32)
    return index, (index >= 0).sum(1).to(torch.int32)


@kernel(
    mutates=("counters", "predict"),
    meta=lambda seeds, most: _accepted_meta(seeds, most),
    cost=lambda req_pool_indices, seeds, predict, most: Work(
        nbytes(req_pool_indices, seeds, predict) + INT32 * seeds.shape[0] * most
    ),
    footprint=lambda counters, req_pool_indices, seeds, predict: (
        *reads(req_pool_indices, seeds),
        Access(counters, write=True, rows=req_pool_indices),
        Access(predict, write=True),
    ),
    integer=True,
)
def accept_simulated(
    counters: Tensor,
    req_pool_indices: Tensor,
    seeds: Tensor,
    predict: Tensor,
    most: int,
    mean: float,
    rounded: bool,
    fixed: int,
) -> tuple[Tensor, Tensor]:
    """Simulates ``accept_drafts``: accepts the first nodes of each request, a pseudo-random number of them.

    The number is keyed by the request's seed [b] and by how many verifies it has had, counted in ``counters`` [rows];
    ``fixed`` > 0 is the number for all. ``rounded``: a rounded normal around ``mean``, else one of the two integers
    next to it. ``predict`` [b · d] is overwritten.
    """
    ordinals = counters[req_pool_indices]
    counters[req_pool_indices] = ordinals + 1
    if fixed:
        lens = torch.full_like(seeds, fixed)
    else:
        lens = simulated_lengths(seeds, ordinals, mean, rounded=rounded)
    lens = lens.clamp(1, most)
    b, device = seeds.shape[0], seeds.device
    step = torch.arange(most, device=device)
    index = (torch.arange(b, device=device) * (predict.shape[0] // b)).unsqueeze(1) + step
    predict.fill_(SIMULATED_TOKEN)
    return torch.where(step < lens.unsqueeze(1), index, NONE).to(torch.int32), lens.to(torch.int32)


def simulated_lengths(seeds: Tensor, ordinals: Tensor, mean: float, *, rounded: bool) -> Tensor:
    """Pseudo-random lengths [b] int64 keyed by seeds [b] and ordinals [b], not yet clamped."""
    first, second = (_uniform(seeds, 2 * ordinals + draw) for draw in (0, 1))
    if rounded:  # Box and Muller's normal
        normal = torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)
        return torch.round(normal + mean).to(torch.int64)
    return math.floor(mean) + (first < mean - math.floor(mean)).to(torch.int64)


def _uniform(seeds: Tensor, draws: Tensor) -> Tensor:
    """[b] float64 in [0, 1)."""
    return (mix64(seeds + (draws + 1) * GOLDEN64) >> 11 & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
