"""Drafting: slots of a request's next tokens, the last of the accepted ones, and a draft's candidates: the most likely
tokens of a row and their probabilities, without a sort."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .allocation import fill_rows, place_positions
from .rows import sum_before
from .sampling import BLOCK, MOST_SPLITS, add_mass, exp_difference, splits_of

_PIECE = 256
_PIECES = 4  # programs of each request


@triton.jit(do_not_specialize_on_alignment=["input_ids", "next_ids", "extend_lens"])
def _rotate_ids(input_ids, next_ids, extend_lens, out, block: tl.constexpr) -> None:
    request = tl.program_id(0)
    start, new = sum_before(extend_lens, request), tl.load(extend_lens + request)
    follows = tl.load(next_ids + request).to(tl.int64)
    for first in range(tl.program_id(1) * block, new, tl.num_programs(1) * block):
        at = first + tl.arange(0, block)
        moved = tl.load(input_ids + start + at + 1, mask=at < new - 1, other=0)
        tl.store(out + start + at, tl.where(at < new - 1, moved, follows), mask=at < new)


def rotate_ids(input_ids, next_ids, extend_lens):
    out = torch.empty_like(input_ids)
    if b := extend_lens.shape[0]:
        _rotate_ids[(b, _PIECES)](input_ids, next_ids, extend_lens, out, _PIECE)
    return out


@triton.jit(
    do_not_specialize=["count", "width"], do_not_specialize_on_alignment=["rows", "seq_lens", "slots"]
)
def _draft_places(
    table, rows, seq_lens, positions, slots, count, width, each: tl.constexpr, block: tl.constexpr
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    valid = at < count
    position = tl.load(seq_lens + at // each, mask=valid, other=0) + at % each
    row = tl.load(rows + at // each, mask=valid, other=0)
    slot = tl.load(table + row * width + position, mask=valid, other=0)
    tl.store(positions + at, position, mask=valid)
    tl.store(slots + at, slot.to(tl.int64), mask=valid)


def draft_places(table, req_pool_indices, seq_lens, each, width):
    count = seq_lens.shape[0] * each
    positions, slots = torch.empty((2, count), dtype=torch.int64, device=seq_lens.device).unbind()
    if count:
        tensors = (table, req_pool_indices, seq_lens, positions, slots)
        _draft_places[(triton.cdiv(count, _PIECE),)](*tensors, count, width, each, _PIECE)
    return positions, slots


def write_rows(table, req_pool_indices, starts, lens, slots, width):
    if b := lens.shape[0]:
        fill_rows[(b, _PIECES)](table, req_pool_indices, None, starts, lens, slots, width, _PIECE)


def place_ahead(places):
    table, rows, starts, ends, free_pages, page_size, _, width = places
    if b := starts.shape[0]:
        sizes = (width, free_pages.shape[0], page_size, _PIECE)
        place_positions[(b,)](table, rows, None, starts, ends, free_pages, None, None, *sizes)


@triton.jit(do_not_specialize_on_alignment=["rows", "accept_lens"])
def _pick(rows, accept_lens, out, each: tl.constexpr, width: tl.constexpr, block: tl.constexpr) -> None:
    request = tl.program_id(0).to(tl.int64)
    row = request * each + tl.maximum(tl.load(accept_lens + request), 1) - 1
    at = tl.program_id(1) * block + tl.arange(0, block)
    tl.store(out + request * width + at, tl.load(rows + row * width + at, mask=at < width), mask=at < width)


def pick_accepted(rows, accept_lens):
    b, width = accept_lens.shape[0], math.prod(rows.shape[1:])
    out = torch.empty((b, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    if b:
        block = min(1024, triton.next_power_of_2(width))
        grid = (b, triton.cdiv(width, block))
        _pick[grid](rows, accept_lens, out, rows.shape[0] // b, width, block)
    return out


pick_bonus = pick_accepted


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
