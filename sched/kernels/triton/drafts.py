"""Drafting: slots of a request's next tokens, and the last of the accepted ones."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .placement import pages_before
from .rows import sum_before

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


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "starts", "lens", "slots"])
def _write_rows(table, rows, starts, lens, slots, width, block: tl.constexpr) -> None:
    request = tl.program_id(0)
    target = table + tl.load(rows + request) * width + tl.load(starts + request)
    source, count = slots + sum_before(lens, request), tl.load(lens + request)
    for first in range(tl.program_id(1) * block, count, tl.num_programs(1) * block):
        at = first + tl.arange(0, block)
        slot = tl.load(source + at, mask=at < count, other=0)
        tl.store(target + at, slot.to(table.dtype.element_ty), mask=at < count)


def write_rows(table, req_pool_indices, starts, lens, slots, width):
    if b := lens.shape[0]:
        _write_rows[(b, _PIECES)](table, req_pool_indices, starts, lens, slots, width, _PIECE)


@triton.jit(
    do_not_specialize=["pages", "width"],
    do_not_specialize_on_alignment=["rows", "starts", "ends", "free_pages"],
)
def _place_ahead(
    table, rows, starts, ends, free_pages, pages, width, page_size: tl.constexpr, block: tl.constexpr
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


def place_ahead(places):
    """One program for each request, since it reads the slot before the first that it writes."""
    *tensors, page_size, _, width = places
    if b := places.starts.shape[0]:
        _place_ahead[(b,)](*tensors, places.free_pages.shape[0], width, page_size, _PIECE)


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
