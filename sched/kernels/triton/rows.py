"""Inputs of a forward by rows: positions, each request's last token, and what a graph reads. Each op one launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit
def sum_before(lens, request):
    """The sum of the first ``request`` of ``lens``."""
    total = tl.zeros([], tl.int64)
    for first in range(0, request, 256):
        at = first + tl.arange(0, 256)
        total += tl.sum(tl.load(lens + at, mask=at < request, other=0).to(tl.int64), 0)
    return total


@triton.jit(do_not_specialize=["b"], do_not_specialize_on_alignment=["seq_lens"])
def _decode_positions(seq_lens, out, b, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    length = tl.load(seq_lens + at, mask=at < b, other=1).to(tl.int64)
    tl.store(out + at, tl.maximum(length - 1, 0), mask=at < b)


def decode_positions(seq_lens):
    b = seq_lens.shape[0]
    out = torch.empty(b, dtype=torch.int64, device=seq_lens.device)
    if b:
        _decode_positions[(triton.cdiv(b, _BLOCK),)](seq_lens, out, b, _BLOCK)
    return out


@triton.jit(do_not_specialize_on_alignment=["seq_lens", "extend_lens"])
def _extend_positions(seq_lens, extend_lens, out, block: tl.constexpr) -> None:
    request = tl.program_id(0)
    new = tl.load(extend_lens + request)
    start = tl.load(seq_lens + request).to(tl.int64) - new
    out += sum_before(extend_lens, request)
    for first in range(tl.program_id(1) * block, new, tl.num_programs(1) * block):
        at = first + tl.arange(0, block)
        tl.store(out + at, start + at, mask=at < new)


def extend_positions(seq_lens, extend_lens, num_tokens):
    out = torch.empty(num_tokens, dtype=torch.int64, device=seq_lens.device)
    if num_tokens:
        _extend_positions[(seq_lens.shape[0], 8)](seq_lens, extend_lens, out, _BLOCK)
    return out


@triton.jit(do_not_specialize_on_alignment=["extend_lens"])
def _last_tokens(hidden, extend_lens, out, width: tl.constexpr, block: tl.constexpr) -> None:
    request = tl.program_id(0)
    token = tl.maximum(sum_before(extend_lens, request + 1) - 1, 0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(hidden + token * width + at, mask=at < width, other=0.0)
    tl.store(out + request * width + at, row, mask=at < width)


def last_tokens(hidden, extend_lens):
    b, width = extend_lens.shape[0], hidden.shape[1]
    out = torch.empty((b, width), dtype=hidden.dtype, device=hidden.device)
    if b:
        _last_tokens[(b, triton.cdiv(width, 1024))](hidden, extend_lens, out, width, 1024)
    return out


@triton.jit
def _stage_row(static, source, at, b, padded, pad: tl.constexpr) -> None:
    values = tl.load(source + at, mask=at < b, other=pad)
    tl.store(static + at, values.to(static.dtype.element_ty), mask=at < padded)


@triton.jit(
    do_not_specialize=["b", "padded", "capacity"],
    do_not_specialize_on_alignment=["input_ids", "positions", "rows", "seq_lens", "out_cache_loc"],
)
def _stage_decode(
    static, input_ids, positions, rows, seq_lens, out_cache_loc, b, padded, capacity, block: tl.constexpr
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    _stage_row(static, input_ids, at, b, padded, 0)
    _stage_row(static + capacity, positions, at, b, padded, 0)
    _stage_row(static + 2 * capacity, rows, at, b, padded, 0)
    _stage_row(static + 3 * capacity, seq_lens, at, b, padded, 1)
    _stage_row(static + 4 * capacity, out_cache_loc, at, b, padded, 0)


def stage_decode(static, inputs, padded):
    sizes = (inputs.input_ids.shape[0], padded, static.shape[1], _BLOCK)
    _stage_decode[(triton.cdiv(padded, _BLOCK),)](static, *inputs, *sizes)


@triton.jit(do_not_specialize=["count", "padded"], do_not_specialize_on_alignment=["source"])
def _stage_rows(static, source, count, padded, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    _stage_row(static, source, at, count, padded, 0)


def stage_rows(static, source, padded):
    each = math.prod(static.shape[1:])
    if total := padded * each:
        _stage_rows[(triton.cdiv(total, _BLOCK),)](static, source, source.numel(), total, _BLOCK)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["input_ids"])
def _resolve_negative(input_ids, tokens, count, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    ids = tl.load(input_ids + at, mask=at < count, other=0)
    tl.store(input_ids + at, tl.load(tokens - ids, mask=ids < 0, other=0), mask=ids < 0)


def resolve_negative(input_ids, tokens):
    if count := input_ids.shape[0]:
        _resolve_negative[(triton.cdiv(count, _BLOCK),)](input_ids, tokens, count, _BLOCK)
