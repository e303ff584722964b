"""Kernels of verification: the tree of drafts, the path that the target accepts, simulated acceptance, and penalties:
each draft token is penalised by its own path, and accepted tokens are counted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .declare import INT32, INT64, Work, Written, kernel, meta_tensor, meta_tensors, nbytes
from .sampling import GOLDEN64, mix64

NONE = -1  # no node, no token
# The token that a simulated verify predicts (upstream's value, too); it has no meaning.
SIMULATED_TOKEN = 100


@kernel(
    meta=lambda tokens, draft_tokens: meta_tensors(2, tokens.shape[0], draft_tokens),
    cost=lambda scores, tokens, parents, bonus, draft_tokens: Work(
        nbytes(scores, tokens, parents, bonus) + 2 * INT64 * tokens.shape[0] * draft_tokens
    ),
)
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
    meta=lambda parents: meta_tensors(2, *parents.shape),
    cost=lambda parents: Work(3 * nbytes(parents)),
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


@kernel(
    meta=lambda tokens, most: _accepted_meta(tokens, most),
    cost=lambda tokens, parents, predict, most: Work(
        nbytes(tokens, parents, predict) + INT32 * tokens.shape[0] * (most + 1)
    ),
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
    meta=lambda seeds, most: _accepted_meta(seeds, most),
    cost=lambda req_pool_indices, seeds, predict, most: Work(
        nbytes(req_pool_indices, seeds, predict) + INT32 * seeds.shape[0] * most
    ),
    rows={"counters": "req_pool_indices"},
)
def accept_simulated(
    counters: Written,
    req_pool_indices: Tensor,
    seeds: Tensor,
    predict: Written,
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
    words = (mix64(seeds + (2 * ordinals + draw + 1) * GOLDEN64) for draw in (0, 1))
    first, second = ((word >> 11 & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53 for word in words)
    if rounded:  # Box and Muller's normal
        normal = torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)
        return torch.round(normal + mean).to(torch.int64)
    return math.floor(mean) + (first < mean - math.floor(mean)).to(torch.int64)


@kernel(
    meta=lambda paths: meta_tensor(paths.shape[0] * paths.shape[1], paths.shape[2] - 1),
    cost=lambda tokens, paths: Work(nbytes(tokens) + 2 * nbytes(paths)),
)
def path_tokens(tokens: Tensor, paths: Tensor) -> Tensor:
    """Draft tokens on the path to each node, without the root, which is no draft: [b · d, depth - 1] int64, -1 after
    the last. ``tokens`` [b, d], ``paths`` [b, d, depth] as ``tree_paths`` has them."""
    b, d, depth = paths.shape
    drafts = paths[:, :, 1:]
    picked = tokens.gather(1, drafts.clamp(min=0).reshape(b, -1)).view(b * d, depth - 1)
    return torch.where(drafts.reshape(b * d, depth - 1) >= 0, picked, -1)


def _count(state: Tensor, values: Tensor, tokens: Tensor, *, adds: bool) -> None:
    """Counts column by column, so that sums are rounded as if the tokens had been generated one by one."""
    if not state.shape[0]:
        return
    wide = torch.cat([state, state[:, :1]], 1)  # a column more for entries that are no token
    for column in tokens.unbind(1):
        ids = torch.where(column >= 0, column, state.shape[1]).unsqueeze(1)
        (wide.scatter_add_ if adds else wide.scatter_)(1, ids, values)
    state.copy_(wide[:, :-1])


@kernel(
    meta=lambda state, paths: meta_tensor(paths.shape[0], state.shape[1], dtype=state.dtype),
    cost=lambda state, values, paths: Work(
        nbytes(state, values, paths) + paths.shape[0] * state.shape[1] * state.element_size()
    ),
)
def along_paths(state: Tensor, values: Tensor, paths: Tensor, adds: bool) -> Tensor:
    """A penalizer's ``state`` [b, vocab] as it would be at each node: [b · d, vocab]. ``values`` [b, 1] is what a
    token adds, or sets; ``paths`` [b · d, depth] int64 are each node's draft tokens, -1 after the last."""
    each = paths.shape[0] // state.shape[0]
    out = state.repeat_interleave(each, 0)
    _count(out, values.repeat_interleave(each, 0), paths, adds=adds)
    return out


@kernel(cost=lambda values, accepted: Work(nbytes(values) + 3 * nbytes(accepted)))
def count_accepted(state: Written, values: Tensor, accepted: Tensor, adds: bool) -> None:
    """Counts the tokens ``accepted`` [b, n] int64, -1 where there is none, in ``state`` [b, vocab], in their order."""
    _count(state, values, accepted, adds=adds)
