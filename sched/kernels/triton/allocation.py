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
    do_not_specialize_on_alignment=["free_pages", "rows", "seq_lens", "orig_seq_lens", "last_loc"],
)
def _place_decode(
    table,
    rows,
    seq_lens,
    orig_seq_lens,
    last_loc,
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
    """Without ``table`` only ``slots`` are written: the lengths count the new tokens already, whose predecessors are in
    ``last_loc``."""
    opened = tl.full([], 0, tl.int32)
    for first in range(0, b, block):
        at = first + tl.arange(0, block)
        valid = at < b
        length = tl.load(seq_lens + at, mask=valid, other=0)
        if table is None:
            length -= 1
            old = tl.load(last_loc + at, mask=valid, other=0).to(tl.int64) + 1
        else:
            row = table + tl.load(rows + at, mask=valid, other=0) * width
            old = tl.load(row + length - 1, mask=valid & (length > 0), other=-1).to(tl.int64) + 1
        opens = valid & (length % page_size == 0)
        nth = opened + tl.cumsum(opens.to(tl.int32), 0) - 1
        opened = tl.max(nth, 0) + 1
        page = tl.load(free_pages + tl.minimum(tl.maximum(nth, 0), pages - 1), mask=opens, other=0)
        slot = tl.where(opens, page * page_size, old)
        tl.store(slots + at, slot, mask=valid)
        if table is not None:
            tl.store(row + length, slot.to(table.dtype.element_ty), mask=valid)
            tl.store(longer + at, length + 1, mask=valid)
            tl.store(orig_longer + at, tl.load(orig_seq_lens + at, mask=valid, other=0) + 1, mask=valid)


def place_decode(req_to_token, req_pool_indices, seq_lens, orig_seq_lens, free_pages, page_size):
    b = seq_lens.shape[0]
    slots = torch.empty(b, dtype=torch.int64, device=seq_lens.device)
    longer, orig_longer = torch.empty_like(slots), torch.empty_like(orig_seq_lens)
    tensors = (req_to_token, req_pool_indices, seq_lens, orig_seq_lens, None, free_pages)
    sizes = (b, req_to_token.shape[1], free_pages.shape[0], page_size, _BATCH)
    _place_decode[(1,)](*tensors, slots, longer, orig_longer, *sizes)
    return slots, longer, orig_longer


def alloc_decode_slots(seq_lens, last_loc, free_pages, page_size):
    b = seq_lens.shape[0]
    slots = torch.empty(b, dtype=torch.int64, device=seq_lens.device)
    tensors = (None, None, seq_lens, None, last_loc, free_pages, slots, None, None)
    _place_decode[(1,)](*tensors, b, 0, free_pages.shape[0], page_size, _BATCH)
    return slots


@triton.jit
def _fill(target, source, count, block: tl.constexpr) -> None:
    """Copies ``count`` entries; the programs of a row take turns."""
    for first in range(tl.program_id(1) * block, count, tl.num_programs(1) * block):
        at = first + tl.arange(0, block)
        entries = tl.load(source + at, mask=at < count, other=0)
        tl.store(target + at, entries.to(target.dtype.element_ty), mask=at < count)


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


@triton.jit(
    do_not_specialize=["width", "pages"],
    do_not_specialize_on_alignment=["prefix", "prefix_lens", "seq_lens", "rows", "free_pages", "last_loc"],
)
def place_positions(
    table,
    rows,
    prefix,
    prefix_lens,
    seq_lens,
    free_pages,
    slots,
    last_loc,
    width,
    pages,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Slots of the positions [prefix_len, seq_len) of each request, in its row, if there is a ``table``, and, if given,
    in ``slots``. The slots before are ``prefix``, which the row gets too, or the last of them is in ``last_loc``.
    Without both the row already has them, and a request has one program, since it reads the last of them."""
    request = tl.program_id(0)
    begins, ends = tl.load(prefix_lens + request), tl.load(seq_lens + request)
    opened, tokens = _pages_before(prefix_lens, seq_lens, request, page_size)
    if table is not None:
        row = table + tl.load(rows + request).to(tl.int64) * width
    if last_loc is not None:
        last = tl.load(last_loc + request).to(tl.int64)
    elif prefix is None:
        last = tl.load(row + begins - 1, mask=begins > 0, other=0).to(tl.int64)
    else:
        prefix += sum_before(prefix_lens, request)
        last = tl.load(prefix + begins - 1, mask=begins > 0, other=-1)
        _fill(row, prefix, begins, block)
    held = tl.cdiv(begins, page_size)
    for first in range(begins + tl.program_id(1) * block, ends, tl.num_programs(1) * block):
        at = first + tl.arange(0, block)
        valid = at < ends
        fresh = valid & (at // page_size >= held)
        nth = tl.minimum(tl.maximum(opened + at // page_size - held, 0), pages - 1)
        page = tl.load(free_pages + nth, mask=fresh, other=0)
        slot = tl.where(fresh, page * page_size + at % page_size, last + 1 + at - begins)
        if table is not None:
            tl.store(row + at, slot.to(table.dtype.element_ty), mask=valid)
        if slots is not None:
            tl.store(slots + tokens + at - begins, slot, mask=valid)


def place_extend(prompts):
    *tensors, page_size, num_tokens = prompts
    slots = torch.empty(num_tokens, dtype=torch.int64, device=prompts.seq_lens.device)
    sizes = (prompts.req_to_token.shape[1], prompts.free_pages.shape[0], page_size, _PIECE)
    place_positions[(prompts.seq_lens.shape[0], _PIECES)](*tensors, slots, None, *sizes)
    return slots


def alloc_extend_slots(prefix_lens, seq_lens, last_loc, free_pages, page_size, num_tokens):
    slots = torch.empty(num_tokens, dtype=torch.int64, device=seq_lens.device)
    tensors = (None, None, None, prefix_lens, seq_lens, free_pages, slots, last_loc)
    place_positions[(seq_lens.shape[0], _PIECES)](*tensors, 0, free_pages.shape[0], page_size, _PIECE)
    return slots


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["rows", "addresses", "starts", "lens", "slots"],
)
def fill_rows(table, rows, addresses, starts, lens, slots, width, block: tl.constexpr) -> None:
    """Writes ``slots`` to each row, ``lens`` of them from ``starts`` on. With ``addresses`` the row also gets what lies
    there, in front of them."""
    request = tl.program_id(0)
    begins = tl.load(starts + request)
    row = table + tl.load(rows + request).to(tl.int64) * width
    if addresses is not None:
        _fill(row, tl.load(addresses + request).to(tl.pointer_type(tl.int64)), begins, block)
    _fill(row + begins, slots + sum_before(lens, request), tl.load(lens + request), block)


def write_cache_indices(req_to_token, extend):
    rows, _, addresses, prefix_lens, _, extend_lens, slots = extend
    tensors = (rows, addresses, prefix_lens, extend_lens, slots)
    fill_rows[(rows.shape[0], _PIECES)](req_to_token, *tensors, req_to_token.shape[1], _PIECE)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "seq_lens", "positions"])
def _copy_rows(
    tokens, rows, seq_lens, table, pages, input_ids, positions, width, block: tl.constexpr
) -> None:
    """Without ``tokens`` no inputs are made, without ``pages`` no row is copied."""
    request = tl.program_id(0)
    row, length = tl.load(rows + request).to(tl.int64), tl.load(seq_lens + request)
    if tokens is not None and tl.program_id(1) == 0:
        tl.store(input_ids + request, tl.load(tokens + row))
        tl.store(positions + request, tl.maximum(length - 1, 0))
    if pages is not None:
        _fill(pages + row * width, table + row * width, length, block)


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
