"""RMSNorm, a program for each row; the gated activation, in pieces of a row; and norms of heads, rotary positions and
the cache's write in one pass over qkv, of which a program has one token and a few of its heads: q's first, then k's,
then v's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(x, residual, weight, out, eps, width: tl.constexpr, block: tl.constexpr) -> None:
    """Without ``residual`` the norm of x; with it x is added to it first."""
    at = tl.arange(0, block)
    valid = at < width
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * width + at, mask=valid, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * width + at, mask=valid, other=0.0).to(tl.float32)
        value = value.to(residual.dtype.element_ty).to(tl.float32)
        tl.store(residual + row * width + at, value.to(residual.dtype.element_ty), mask=valid)
    scale = tl.load(weight + at, mask=valid, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    root = tl.rsqrt(tl.sum(value * value, axis=-1, keep_dims=True) / width + eps)
    normed = (value * root).to(dtype).to(tl.float32) * scale  # rounded as torch's is
    tl.store(out + row * width + at, normed.to(dtype), mask=valid)


def add_rms_norm(x, residual, weight, eps):
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(max(block // 512, 1), 16)
        _rms_norm[(rows,)](x, residual, weight, out, eps, width, block, num_warps=warps)
    return out


def rms_norm(x, weight, eps):
    return add_rms_norm(x, None, weight, eps)


@triton.jit
def _silu_and_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    valid = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=valid, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * width + at, (silu * up).to(dtype), mask=valid)


def silu_and_mul(gate_up):
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _silu_and_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block)
    return out


_HEADS = 8  # of one program


@triton.jit
def _scale(weight, at, valid, inside):
    """[heads, half] of a norm's weight for the heads that are ``inside`` [heads, 1], 0 for others."""
    return tl.load(weight + at, mask=valid & inside, other=0.0).to(tl.float32)


@triton.jit
def _normed(first, second, q_norm, k_norm, at, is_q, is_k, eps, half: tl.constexpr, dtype: tl.constexpr):
    """Both halves [heads, half] of q and k heads, normalised over the two together; v as it is."""
    valid = at < half
    squares = tl.sum(first * first, axis=1, keep_dims=True) + tl.sum(second * second, axis=1, keep_dims=True)
    root = tl.rsqrt(squares / (2 * half) + eps)
    front = _scale(q_norm, at, valid, is_q) + _scale(k_norm, at, valid, is_k)
    back = _scale(q_norm, at + half, valid, is_q) + _scale(k_norm, at + half, valid, is_k)
    one = (first * root).to(dtype).to(tl.float32) * front
    two = (second * root).to(dtype).to(tl.float32) * back
    turns = is_q | is_k
    return tl.where(turns, one.to(dtype).to(tl.float32), first), tl.where(
        turns, two.to(dtype).to(tl.float32), second
    )


@triton.jit
def _store_halves(target, first, second, at, mask, half: tl.constexpr) -> None:
    dtype = target.dtype.element_ty
    tl.store(target + at, first.to(dtype), mask=mask)
    tl.store(target + at + half, second.to(dtype), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions", "out_cache_loc"])
def _rope_and_store_kv(
    qkv,
    positions,
    cos_sin,
    q_norm,
    k_norm,
    out_cache_loc,
    k_cache,
    v_cache,
    out,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    at = tl.arange(0, block)[None, :]
    mask = (head < heads + 2 * kv_heads) & (at < half)
    source = qkv + (token * (heads + 2 * kv_heads) + head) * 2 * half + at
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    is_q, is_k = head < heads, (head >= heads) & (head < heads + kv_heads)
    if q_norm is not None:
        first, second = _normed(
            first, second, q_norm, k_norm, at, is_q, is_k, eps, half, qkv.dtype.element_ty
        )
    turn = cos_sin + tl.load(positions + token) * 2 * half + at
    cos, sin = tl.load(turn, mask=at < half, other=0.0), tl.load(turn + half, mask=at < half, other=0.0)
    slot = tl.load(out_cache_loc + token).to(tl.int64) * kv_heads
    v_head = head - heads - kv_heads
    _store_halves(v_cache, first, second, (slot + v_head) * 2 * half + at, mask & (v_head >= 0), half)
    rotated, other = first * cos - second * sin, second * cos + first * sin
    _store_halves(k_cache, rotated, other, (slot + head - heads) * 2 * half + at, mask & is_k, half)
    _store_halves(out, rotated, other, (token * heads + head) * 2 * half + at, mask & is_q, half)


def rope_and_store_kv(projected):
    qkv, positions, cos_sin, q_norm, k_norm, eps, out_cache_loc, k_cache, v_cache = projected
    _, kv_heads, head_dim = k_cache.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads
    out = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        grid = (tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS))
        block = triton.next_power_of_2(head_dim // 2)
        tensors = (qkv, positions, cos_sin, q_norm, k_norm, out_cache_loc, k_cache, v_cache, out)
        _rope_and_store_kv[grid](*tensors, eps, heads, kv_heads, head_dim // 2, _HEADS, block, num_warps=2)
    return out
