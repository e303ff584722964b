"""A draft's candidates: the most likely tokens of a row and their probabilities, without a sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .filters import BLOCK
from .sampling import MOST_SPLITS, add_mass, exp_difference, splits_of


@triton.jit
def _later(values, ids, value, place):
    """Whether each pair comes after (value, place), in the order of larger values, then lower ids."""
    return (values < value) | ((values == value) & (ids > place))


@triton.jit
def _first(values, ids):
    """The first of the pairs in that order."""
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, ids, 2147483647), 0)


@triton.jit(do_not_specialize=["stride", "vocab", "size"], do_not_specialize_on_alignment=["masses"])
def _search(
    logits, tops, masses, values, ids, stride, vocab, size, topk: tl.constexpr, block: tl.constexpr
) -> None:
    """Finds the mass of ``size`` logits and their ``topk`` first pairs, one after the other."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    begins = split * size
    ends = tl.minimum(begins + size, vocab)
    part = row * tl.num_programs(1) + split
    top, mass = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(begins, ends, block):
        at = first + tl.arange(0, block)
        top, mass = add_mass(
            top, mass, tl.load(logits + at, mask=at < ends, other=float("-inf")).to(tl.float32)
        )
    tl.store(tops + part, top)
    tl.store(masses + part, mass)
    value, place = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
    for nth in tl.static_range(topk):
        best = tl.full([block], float("-inf"), tl.float32)
        winner = tl.full([block], 2147483647, tl.int32)
        for first in range(begins, ends, block):
            at = first + tl.arange(0, block)
            here = tl.load(logits + at, mask=at < ends, other=float("-inf")).to(tl.float32)
            better = (at < ends) & _later(here, at, value, place) & (here > best)
            best, winner = tl.where(better, here, best), tl.where(better, at, winner)
        value, place = _first(best, winner)
        tl.store(values + part * topk + nth, value)
        tl.store(ids + part * topk + nth, place)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["masses"])
def _merge(
    tops,
    masses,
    values,
    ids,
    shares,
    out,
    splits,
    topk: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, most), tl.arange(0, block)
    top = tl.load(tops + row * splits + split, mask=split < splits, other=float("-inf"))
    highest = tl.max(top, 0)
    mass = tl.load(masses + row * splits + split, mask=split < splits, other=0.0)
    total = highest + tl.log(tl.sum(mass * exp_difference(top, highest), 0))
    valid = at < splits * topk
    found = tl.load(values + row * splits * topk + at, mask=valid, other=float("-inf"))
    place = tl.load(ids + row * splits * topk + at, mask=valid, other=2147483647)
    value, token = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
    for nth in tl.static_range(topk):
        left = tl.where(_later(found, place, value, token), found, float("-inf"))
        value, token = _first(left, tl.where(_later(found, place, value, token), place, 2147483647))
        tl.store(shares + row * topk + nth, tl.exp(value - total))
        # A graph's padding rows may hold NaN; their token has to be a valid id nevertheless.
        tl.store(out + row * topk + nth, tl.where(token < 2147483647, token, 0).to(tl.int64))


def draft_topk(logits, topk):
    n, vocab = logits.shape
    shares = torch.empty((n, topk), dtype=torch.float32, device=logits.device)
    out = torch.empty((n, topk), dtype=torch.int64, device=logits.device)
    if not n:
        return shares, out
    splits, size = splits_of(logits)
    tops, masses = torch.empty((2, n, splits), dtype=torch.float32, device=logits.device).unbind()
    values = torch.empty((n, splits, topk), dtype=torch.float32, device=logits.device)
    ids = torch.empty((n, splits, topk), dtype=torch.int32, device=logits.device)
    parts = (tops, masses, values, ids)
    _search[(n, splits)](logits, *parts, logits.stride(0), vocab, size, topk, BLOCK.value)
    block = triton.next_power_of_2(MOST_SPLITS * topk)
    _merge[(n,)](*parts, shares, out, splits, topk, MOST_SPLITS, block)
    return shares, out
