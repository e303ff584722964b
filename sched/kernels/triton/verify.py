"""The tree of drafts and its accepted path: a program for each request, a lane for each node."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["above"])
def _build_tree(
    scores, tokens, parents, bonus, places, nodes, above, n, drafts: tl.constexpr, block: tl.constexpr
) -> None:
    """``places`` [b, n] is scratch: the node that a chosen candidate becomes."""
    request = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    valid = at < n
    own = request * n + at
    score = tl.load(scores + own, mask=valid, other=float("-inf"))
    rank = tl.zeros([block], tl.int32)
    for other in range(n):
        against = tl.load(scores + request * n + other)
        rank += ((against > score) | ((against == score) & (other < at))).to(tl.int32)
    chosen = valid & (rank < drafts - 1)
    place = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(places + own, place, mask=chosen)
    tl.debug_barrier()
    parent = tl.load(parents + own, mask=chosen, other=-1)
    node = tl.load(places + request * n + parent, mask=chosen & (parent >= 0), other=0).to(tl.int64)
    token = tl.load(tokens + own, mask=chosen, other=0)
    tl.store(nodes + request * drafts + place, token, mask=chosen)
    tl.store(above + request * drafts + place, node, mask=chosen)
    tl.store(nodes + request * drafts, tl.load(bonus + request))
    tl.store(above + request * drafts, tl.full([], -1, tl.int64))


def build_tree(scores, tokens, parents, bonus, draft_tokens):
    b, n = tokens.shape
    nodes, above = torch.empty((2, b, draft_tokens), dtype=torch.int64, device=tokens.device).unbind()
    if b:
        places = torch.empty((b, n), dtype=torch.int32, device=tokens.device)
        candidates = (scores, tokens, parents)
        block = triton.next_power_of_2(n)
        _build_tree[(b,)](*candidates, bonus, places, nodes, above, n, draft_tokens, block)
    return nodes, above


@triton.jit
def _parents_of(parents, node):
    """The parent of each ``node``, -1 of the root and of none."""
    return tl.load(parents + node, mask=node > 0, other=-1)


@triton.jit(do_not_specialize_on_alignment=["parents"])
def _tree_paths(
    parents, paths, counts, nodes: tl.constexpr, depth: tl.constexpr, block: tl.constexpr
) -> None:
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    inside = lane < nodes
    parents += request * nodes
    path = paths + (request * nodes + lane) * depth
    start = tl.where(inside, lane, -1).to(tl.int64)
    node, count = start, tl.zeros([block], tl.int64)
    for _ in tl.static_range(depth):
        count += (node >= 0).to(tl.int64)
        node = _parents_of(parents, node)
    tl.store(counts + request * nodes + lane, count, mask=inside)
    node = start
    for step in tl.static_range(depth):
        tl.store(path + count - 1 - step, node, mask=inside & (node >= 0))
        tl.store(path + step, tl.full([block], -1, tl.int64), mask=inside & (step >= count))
        node = _parents_of(parents, node)


def tree_paths(parents, depth):
    b, nodes = parents.shape
    paths = torch.empty((b, nodes, depth), dtype=torch.int64, device=parents.device)
    counts = torch.empty((b, nodes), dtype=torch.int64, device=parents.device)
    if b:
        block = triton.next_power_of_2(nodes)
        _tree_paths[(b,)](parents, paths, counts, nodes, depth, block)
    return paths, counts


@triton.jit(do_not_specialize_on_alignment=["tokens", "parents", "predict"])
def _accept_drafts(
    tokens, parents, predict, index, lens, nodes: tl.constexpr, most: tl.constexpr, block: tl.constexpr
) -> None:
    request = tl.program_id(0)
    lane = tl.arange(0, block)
    inside, base = lane < nodes, request * nodes
    token = tl.load(tokens + base + lane, mask=inside, other=0)
    parent = lane.to(tl.int64) - 1
    if parents is not None:
        parent = tl.load(parents + base + lane, mask=inside, other=-1)
    node, count = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for step in tl.static_range(most):
        tl.store(index + request * most + step, tl.where(node >= 0, base + node, -1))
        count += (node >= 0).to(tl.int32)
        wanted = tl.load(predict + base + tl.maximum(node, 0))
        # After the walk has ended the parent is -2, which no node has.
        fits = inside & (parent == tl.where(node >= 0, node, -2)) & (token == wanted)
        found = tl.min(tl.where(fits, lane, block), 0)
        node = tl.where(found < block, found, -1)
    tl.store(lens + request, count)


def accept_drafts(tokens, parents, predict, most):
    b, nodes = tokens.shape
    index = torch.empty((b, most), dtype=torch.int32, device=tokens.device)
    lens = torch.empty(b, dtype=torch.int32, device=tokens.device)
    if b:
        sizes = (nodes, most, triton.next_power_of_2(nodes))
        _accept_drafts[(b,)](tokens, parents, predict, index, lens, *sizes, num_warps=1)
    return index, lens
