"""Bookkeeping of hot buffers, each op one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["out_cache_loc", "free_pages"])
def _map_prompt(
    mapping, out_cache_loc, free_pages, tokens, page_size: tl.constexpr, block: tl.constexpr
) -> None:
    opened = tl.full([], 0, tl.int32)
    for first in range(0, tokens, block):
        at = first + tl.arange(0, block)
        valid = at < tokens
        slot = tl.load(out_cache_loc + at, mask=valid, other=1)
        nth = opened + tl.cumsum((valid & (slot % page_size == 0)).to(tl.int32), 0)
        opened = tl.max(nth, 0)
        page = tl.load(free_pages + nth - 1, mask=valid, other=0)
        tl.store(mapping + slot, page * page_size + slot % page_size, mask=valid)


def map_prompt(mapping, out_cache_loc, free_pages, page_size):
    """One program: it counts the pages that the tokens open."""
    if tokens := out_cache_loc.shape[0]:
        _map_prompt[(1,)](mapping, out_cache_loc, free_pages, tokens, page_size, _BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _unmap(mapping, slots, out, tokens, page_size: tl.constexpr, block: tl.constexpr) -> None:
    """A program has whole pages: it reads their places before it clears them."""
    at = tl.program_id(0) * block * page_size + tl.arange(0, block)
    for _ in range(page_size):
        start = at // page_size * page_size
        logical = tl.load(slots + start, mask=start < tokens, other=0).to(tl.int64)
        place = tl.load(mapping + logical, mask=start < tokens, other=0)
        tl.store(out + at, place + at % page_size, mask=start < tokens)
        at += block
    tl.debug_barrier()
    at = tl.program_id(0) * block * page_size + tl.arange(0, block)
    for _ in range(page_size):
        logical = tl.load(slots + at, mask=at < tokens, other=0).to(tl.int64)
        tl.store(mapping + logical, tl.zeros([block], tl.int64), mask=at < tokens)
        at += block


def unmap(mapping, slots, page_size):
    pages = triton.cdiv(slots.shape[0], page_size)
    out = torch.empty(pages * page_size, dtype=torch.int64, device=mapping.device)
    if pages:
        _unmap[(triton.cdiv(pages, 128),)](mapping, slots, out, slots.shape[0], page_size, 128)
    return out


@triton.jit(
    do_not_specialize=["b", "width"], do_not_specialize_on_alignment=["out_cache_loc", "rows", "seq_lens"]
)
def _map_newest(
    mapping, out_cache_loc, device_buffer, rows, seq_lens, b, width, size: tl.constexpr, block: tl.constexpr
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    valid = at < b
    place = tl.minimum(tl.load(seq_lens + at, mask=valid, other=1) - 1, size)
    row = tl.load(rows + at, mask=valid, other=0)
    slot = tl.load(device_buffer + row * width + place, mask=valid, other=0)
    tl.store(mapping + tl.load(out_cache_loc + at, mask=valid, other=0), slot, mask=valid)


def map_newest(newest):
    *tensors, size = newest
    if b := newest.seq_lens.shape[0]:
        _map_newest[(triton.cdiv(b, 128),)](*tensors, b, newest.device_buffer.shape[1], size, 128)


@triton.jit(
    do_not_specialize=["b", "width", "context"],
    do_not_specialize_on_alignment=["rows", "seq_lens", "targets"],
)
def _previous_tokens(
    device_buffer,
    host_slots,
    staged_lens,
    rows,
    seq_lens,
    slots,
    targets,
    b,
    width,
    context,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    valid = at < b
    position = tl.load(seq_lens + at, mask=valid, other=2) - 2
    row = tl.load(rows + at, mask=valid, other=0)
    slot = tl.load(device_buffer + row * width + tl.minimum(position, size), mask=valid, other=0)
    staged = position < tl.load(staged_lens + row, mask=valid, other=0)
    tl.store(slots + at, tl.where(staged, -1, slot), mask=valid)
    tl.store(targets + at, tl.load(host_slots + row * context + position, mask=valid, other=0), mask=valid)


def previous_tokens(previous):
    *tensors, seq_lens, size = previous
    b = seq_lens.shape[0]
    slots, targets = torch.empty((2, b), dtype=torch.int64, device=seq_lens.device).unbind()
    if b:
        sizes = (b, previous.device_buffer.shape[1], previous.host_slots.shape[1], size, 128)
        _previous_tokens[(triton.cdiv(b, 128),)](*tensors, seq_lens, slots, targets, *sizes)
    return slots, targets
