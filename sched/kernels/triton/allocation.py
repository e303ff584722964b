"""The bookkeeping of a step: slots, page table, lengths, positions. Integers only, each op one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import sum_before

_BATCH = 1024  # requests processed together by the one program that counts the pages they open
_PIECE = 256  # entries of a row that a program copies together
_PIECES = 8  # programs of each row


@triton.jit(
    do_not_specialize=["b", "width", "pages"],
    do_not_specialize_on_alignment=["free_pages", "rows", "seq_lens", "orig_seq_lens"],
)
def _place_decode(
    table,
    rows,
    seq_lens,
    orig_seq_lens,
    free_pages,
    slots,
    longer,
    orig_longer,
    b,
    width,
    pages,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    opened = tl.full([], 0, tl.int32)
    for first in range(0, b, block):
        at = first + tl.arange(0, block)
        valid = at < b
        length = tl.load(seq_lens + at, mask=valid, other=0)
        opens = valid & (length % page_size == 0)
        nth = opened + tl.cumsum(opens.to(tl.int32), 0) - 1
        opened = tl.max(nth, 0) + 1
        row = table + tl.load(rows + at, mask=valid, other=0) * width
        old = tl.load(row + length - 1, mask=valid & (length > 0), other=-1).to(tl.int64) + 1
        page = tl.load(free_pages + tl.minimum(tl.maximum(nth, 0), pages - 1), mask=opens, other=0)
        slot = tl.where(opens, page * page_size, old)
        tl.store(row + length, slot.to(table.dtype.element_ty), mask=valid)
        tl.store(slots + at, slot, mask=valid)
        tl.store(longer + at, length + 1, mask=valid)
        tl.store(orig_longer + at, tl.load(orig_seq_lens + at, mask=valid, other=0) + 1, mask=valid)


def place_decode(req_to_token, req_pool_indices, seq_lens, orig_seq_lens, free_pages, page_size):
    b = seq_lens.shape[0]
    slots = torch.empty(b, dtype=torch.int64, device=seq_lens.device)
    longer, orig_longer = torch.empty_like(slots), torch.empty_like(orig_seq_lens)
    tensors = (req_to_token, req_pool_indices, seq_lens, orig_seq_lens, free_pages)
    sizes = (b, req_to_token.shape[1], free_pages.shape[0], page_size, _BATCH)
    _place_decode[(1,)](*tensors, slots, longer, orig_longer, *sizes)
    return slots, longer, orig_longer


@triton.jit
def _pages_before(prefix_lens, seq_lens, request, page_size: tl.constexpr):
    """Pages that the first ``request`` requests open, and their new tokens."""
    pages, tokens = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for first in range(0, request, 256):
        at = first + tl.arange(0, 256)
        prefix = tl.load(prefix_lens + at, mask=at < request, other=0)
        length = tl.load(seq_lens + at, mask=at < request, other=0)
        pages += tl.sum(tl.cdiv(length, page_size) - tl.cdiv(prefix, page_size), 0)
        tokens += tl.sum(length - prefix, 0)
    return pages, tokens


@triton.jit
def _slots_at(at, valid, begins, last, opened, free_pages, pages, page_size: tl.constexpr):
    """Slots of the positions ``at`` of a request whose new tokens begin at ``begins``, behind the slot ``last``.
    ``opened`` pages went to the requests before it."""
    held = tl.cdiv(begins, page_size)
    nth = tl.minimum(tl.maximum(opened + at // page_size - held, 0), pages - 1)
    fresh = valid & (at // page_size >= held)
    page = tl.load(free_pages + nth, mask=fresh, other=0)
    return tl.where(fresh, page * page_size + at % page_size, last + 1 + at - begins)


@triton.jit(
    do_not_specialize=["width", "pages"],
    do_not_specialize_on_alignment=["prefix", "prefix_lens", "seq_lens", "rows", "free_pages"],
)
def place_positions(
    table,
    rows,
    prefix,
    prefix_lens,
    seq_lens,
    free_pages,
    slots,
    width,
    pages,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Slots of the positions [prefix_len, seq_len) of each request, in its row and, if given, in ``slots``. Without
    ``prefix`` the row already has the slots before, and a request has one program, since it reads the last of them."""
    request = tl.program_id(0)
    stride = tl.num_programs(1) * block
    begins = tl.load(prefix_lens + request)
    ends = tl.load(seq_lens + request)
    row = table + tl.load(rows + request).to(tl.int64) * width
    opened, tokens = _pages_before(prefix_lens, seq_lens, request, page_size)
    if prefix is None:
        last = tl.load(row + begins - 1, mask=begins > 0, other=0).to(tl.int64)
    else:
        prefix += sum_before(prefix_lens, request)
        last = tl.load(prefix + begins - 1, mask=begins > 0, other=-1)
        for first in range(tl.program_id(1) * block, begins, stride):
            at = first + tl.arange(0, block)
            cached = tl.load(prefix + at, mask=at < begins, other=0)
            tl.store(row + at, cached.to(table.dtype.element_ty), mask=at < begins)
    for first in range(begins + tl.program_id(1) * block, ends, stride):
        at = first + tl.arange(0, block)
        valid = at < ends
        slot = _slots_at(at, valid, begins, last, opened, free_pages, pages, page_size)
        tl.store(row + at, slot.to(table.dtype.element_ty), mask=valid)
        if slots is not None:
            tl.store(slots + tokens + at - begins, slot, mask=valid)


def place_extend(prompts):
    *tensors, page_size, num_tokens = prompts
    slots = torch.empty(num_tokens, dtype=torch.int64, device=prompts.seq_lens.device)
    sizes = (prompts.req_to_token.shape[1], prompts.free_pages.shape[0], page_size, _PIECE)
    place_positions[(prompts.seq_lens.shape[0], _PIECES)](*tensors, slots, *sizes)
    return slots


@triton.jit(
    do_not_specialize=["pages"],
    do_not_specialize_on_alignment=["prefix_lens", "seq_lens", "last_loc", "free_pages"],
)
def _alloc_extend(
    prefix_lens,
    seq_lens,
    last_loc,
    free_pages,
    slots,
    pages,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    begins, ends = tl.load(prefix_lens + request), tl.load(seq_lens + request)
    opened, tokens = _pages_before(prefix_lens, seq_lens, request, page_size)
    last = tl.load(last_loc + request).to(tl.int64)
    for first in range(begins + tl.program_id(1) * block, ends, tl.num_programs(1) * block):
        at = first + tl.arange(0, block)
        valid = at < ends
        slot = _slots_at(at, valid, begins, last, opened, free_pages, pages, page_size)
        tl.store(slots + tokens + at - begins, slot, mask=valid)


def alloc_extend_slots(prefix_lens, seq_lens, last_loc, free_pages, page_size, num_tokens):
    slots = torch.empty(num_tokens, dtype=torch.int64, device=seq_lens.device)
    tensors = (prefix_lens, seq_lens, last_loc, free_pages, slots)
    _alloc_extend[(seq_lens.shape[0], _PIECES)](*tensors, free_pages.shape[0], page_size, _PIECE)
    return slots


@triton.jit(
    do_not_specialize=["b", "pages"],
    do_not_specialize_on_alignment=["seq_lens", "last_loc", "free_pages"],
)
def _alloc_decode(
    seq_lens, last_loc, free_pages, slots, b, pages, page_size: tl.constexpr, block: tl.constexpr
) -> None:
    opened = tl.full([], 0, tl.int32)
    for first in range(0, b, block):
        at = first + tl.arange(0, block)
        valid = at < b
        opens = valid & ((tl.load(seq_lens + at, mask=valid, other=0) - 1) % page_size == 0)
        nth = opened + tl.cumsum(opens.to(tl.int32), 0) - 1
        opened = tl.max(nth, 0) + 1
        page = tl.load(free_pages + tl.minimum(tl.maximum(nth, 0), pages - 1), mask=opens, other=0)
        last = tl.load(last_loc + at, mask=valid, other=0).to(tl.int64)
        tl.store(slots + at, tl.where(opens, page * page_size, last + 1), mask=valid)


def alloc_decode_slots(seq_lens, last_loc, free_pages, page_size):
    b = seq_lens.shape[0]
    slots = torch.empty(b, dtype=torch.int64, device=seq_lens.device)
    _alloc_decode[(1,)](seq_lens, last_loc, free_pages, slots, b, free_pages.shape[0], page_size, _BATCH)
    return slots


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["rows", "addresses", "prefix_lens", "seq_lens", "extend_lens", "slots"],
)
def _write_rows(
    table,
    rows,
    addresses,
    prefix_lens,
    seq_lens,
    extend_lens,
    slots,
    width,
    block: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    begins, ends = tl.load(prefix_lens + request), tl.load(seq_lens + request)
    row = table + tl.load(rows + request).to(tl.int64) * width
    prefix = tl.load(addresses + request).to(tl.pointer_type(tl.int64))
    slots += sum_before(extend_lens, request) - begins
    for first in range(tl.program_id(1) * block, ends, tl.num_programs(1) * block):
        at = first + tl.arange(0, block)
        cached = tl.load(prefix + at, mask=at < begins, other=0)
        fresh = tl.load(slots + at, mask=(at >= begins) & (at < ends), other=0)
        entry = tl.where(at < begins, cached, fresh)
        tl.store(row + at, entry.to(table.dtype.element_ty), mask=at < ends)


def write_cache_indices(req_to_token, extend):
    rows, _, *tensors = extend
    grid = (rows.shape[0], _PIECES)
    _write_rows[grid](req_to_token, rows, *tensors, req_to_token.shape[1], _PIECE)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "seq_lens", "positions"])
def _copy_rows(
    tokens, rows, seq_lens, table, pages, input_ids, positions, width, block: tl.constexpr
) -> None:
    """Without ``tokens`` no inputs are made, without ``pages`` no row is copied."""
    request, piece = tl.program_id(0), tl.program_id(1)
    row, length = tl.load(rows + request).to(tl.int64), tl.load(seq_lens + request)
    if tokens is not None and piece == 0:
        tl.store(input_ids + request, tl.load(tokens + row))
        tl.store(positions + request, tl.maximum(length - 1, 0))
    if pages is not None:
        for first in range(piece * block, length, tl.num_programs(1) * block):
            at = first + tl.arange(0, block)
            entries = tl.load(table + row * width + at, mask=at < length, other=0)
            tl.store(pages + row * width + at, entries, mask=at < length)


def copy_pages(pages, req_to_token, req_pool_indices, seq_lens):
    if b := seq_lens.shape[0]:
        tensors = (None, req_pool_indices, seq_lens, req_to_token, pages, None, None)
        _copy_rows[(b, _PIECES)](*tensors, req_to_token.shape[1], _PIECE)


def decode_inputs(tokens, req_pool_indices, seq_lens, req_to_token, pages):
    b = seq_lens.shape[0]
    input_ids, positions = torch.empty((2, b), dtype=torch.int64, device=seq_lens.device).unbind()
    if b:
        tensors = (tokens, req_pool_indices, seq_lens, req_to_token, pages, input_ids, positions)
        grid = (b, 1 if pages is None else _PIECES)
        _copy_rows[grid](*tensors, req_to_token.shape[1], _PIECE)
    return input_ids, positions
