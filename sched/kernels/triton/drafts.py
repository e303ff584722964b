"""Drafting: the most likely tokens of a row, and where a request's next tokens go."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .extend import sum_before
from .filters import BLOCK
from .placement import pages_before
from .sampling import MOST_SPLITS, faded, heaped, splits_of

_PIECE = 256
_PIECES = 4  # programs of each request


@triton.jit
def _later(values: tl.tensor, ids: tl.tensor, value: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Which of the pairs come behind (value, place), where larger values and lower ids come first."""
    return (values < value) | ((values == value) & (ids > place))


@triton.jit
def _first(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The first of the pairs in that order."""
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, ids, 2147483647), 0)


@triton.jit(do_not_specialize=["stride", "vocab", "size"])
def _search(
    logits: tl.tensor,
    tops: tl.tensor,
    masses: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    size: tl.tensor,
    topk: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The mass of ``size`` logits, and their ``topk`` first pairs, one after the other."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    begins = split * size
    ends = tl.minimum(begins + size, vocab)
    part = row * tl.num_programs(1) + split
    top, mass = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(begins, ends, block):
        at = first + tl.arange(0, block)
        top, mass = heaped(
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


@triton.jit(do_not_specialize=["splits"])
def _merge(
    tops: tl.tensor,
    masses: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    splits: tl.tensor,
    topk: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, most), tl.arange(0, block)
    top = tl.load(tops + row * splits + split, mask=split < splits, other=float("-inf"))
    highest = tl.max(top, 0)
    mass = tl.load(masses + row * splits + split, mask=split < splits, other=0.0)
    total = highest + tl.log(tl.sum(mass * faded(top, highest), 0))
    there = at < splits * topk
    found = tl.load(values + row * splits * topk + at, mask=there, other=float("-inf"))
    place = tl.load(ids + row * splits * topk + at, mask=there, other=2147483647)
    value, token = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
    for nth in tl.static_range(topk):
        left = tl.where(_later(found, place, value, token), found, float("-inf"))
        value, token = _first(left, tl.where(_later(found, place, value, token), place, 2147483647))
        tl.store(shares + row * topk + nth, tl.exp(value - total))
        tl.store(out + row * topk + nth, token.to(tl.int64))


def draft_topk(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
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


@triton.jit(do_not_specialize_on_alignment=["input_ids", "next_ids", "extend_lens"])
def _rotate_ids(
    input_ids: tl.tensor, next_ids: tl.tensor, extend_lens: tl.tensor, out: tl.tensor, block: tl.constexpr
) -> None:
    request = tl.program_id(0)
    start, new = sum_before(extend_lens, request), tl.load(extend_lens + request)
    follows = tl.load(next_ids + request).to(tl.int64)
    for first in range(tl.program_id(1) * block, new, tl.num_programs(1) * block):
        at = first + tl.arange(0, block)
        moved = tl.load(input_ids + start + at + 1, mask=at < new - 1, other=0)
        tl.store(out + start + at, tl.where(at < new - 1, moved, follows), mask=at < new)


def rotate_ids(input_ids: torch.Tensor, next_ids: torch.Tensor, extend_lens: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(input_ids)
    if b := extend_lens.shape[0]:
        _rotate_ids[(b, _PIECES)](input_ids, next_ids, extend_lens, out, _PIECE)
    return out


@triton.jit(do_not_specialize=["count", "width"], do_not_specialize_on_alignment=["rows", "seq_lens"])
def _draft_places(
    table: tl.tensor,
    rows: tl.tensor,
    seq_lens: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    each: tl.constexpr,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < count
    position = tl.load(seq_lens + at // each, mask=there, other=0) + at % each
    row = tl.load(rows + at // each, mask=there, other=0)
    slot = tl.load(table + row * width + position, mask=there, other=0)
    tl.store(positions + at, position, mask=there)
    tl.store(slots + at, slot.to(tl.int64), mask=there)


def draft_places(
    table: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, each: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    count = seq_lens.shape[0] * each
    positions, slots = torch.empty((2, count), dtype=torch.int64, device=seq_lens.device).unbind()
    if count:
        tensors = (table, req_pool_indices, seq_lens, positions, slots)
        _draft_places[(triton.cdiv(count, _PIECE),)](*tensors, count, width, each, _PIECE)
    return positions, slots


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "starts", "lens", "slots"])
def _write_rows(
    table: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    lens: tl.tensor,
    slots: tl.tensor,
    width: tl.tensor,
    block: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    target = table + tl.load(rows + request) * width + tl.load(starts + request)
    source, count = slots + sum_before(lens, request), tl.load(lens + request)
    for first in range(tl.program_id(1) * block, count, tl.num_programs(1) * block):
        at = first + tl.arange(0, block)
        slot = tl.load(source + at, mask=at < count, other=0)
        tl.store(target + at, slot.to(table.dtype.element_ty), mask=at < count)


def write_rows(
    table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    if b := lens.shape[0]:
        _write_rows[(b, _PIECES)](table, req_pool_indices, starts, lens, slots, width, _PIECE)


@triton.jit(
    do_not_specialize=["pages", "width"],
    do_not_specialize_on_alignment=["rows", "starts", "ends", "free_pages"],
)
def _place_ahead(
    table: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    free_pages: tl.tensor,
    pages: tl.tensor,
    width: tl.tensor,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    begins, stops = tl.load(starts + request), tl.load(ends + request)
    row = table + tl.load(rows + request) * width
    opened, _tokens = pages_before(starts, ends, request, page_size)
    last = tl.load(row + tl.maximum(begins - 1, 0)).to(tl.int64)
    held = tl.cdiv(begins, page_size)
    for first in range(begins, stops, block):
        at = first + tl.arange(0, block)
        nth = tl.minimum(tl.maximum(opened + at // page_size - held, 0), pages - 1)
        fresh = (at < stops) & (at // page_size >= held)
        page = tl.load(free_pages + nth, mask=fresh, other=0)
        slot = tl.where(fresh, page * page_size + at % page_size, last + 1 + at - begins)
        tl.store(row + at, slot.to(table.dtype.element_ty), mask=at < stops)


def place_ahead(
    table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    num_tokens: int,  # noqa: ARG001
    width: int,
) -> None:
    """One program for each request: it reads the slot before the first that it writes."""
    if b := starts.shape[0]:
        tensors = (table, req_pool_indices, starts, ends, free_pages)
        _place_ahead[(b,)](*tensors, free_pages.shape[0], width, page_size, _PIECE)


@triton.jit(do_not_specialize_on_alignment=["rows", "accept_lens"])
def _pick(
    rows: tl.tensor,
    accept_lens: tl.tensor,
    out: tl.tensor,
    each: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    row = request * each + tl.maximum(tl.load(accept_lens + request), 1) - 1
    at = tl.program_id(1) * block + tl.arange(0, block)
    tl.store(out + request * width + at, tl.load(rows + row * width + at, mask=at < width), mask=at < width)


def _picked(rows: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    b, width = accept_lens.shape[0], math.prod(rows.shape[1:])
    out = torch.empty((b, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    if b:
        block = min(1024, triton.next_power_of_2(width))
        grid = (b, triton.cdiv(width, block))
        _pick[grid](rows.contiguous(), accept_lens, out, rows.shape[0] // b, width, block)
    return out


def pick_accepted(rows: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    return _picked(rows, accept_lens)


def pick_bonus(rows: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    return _picked(rows, accept_lens)
