"""Kernels for the host's memory, compiled by numba: paged attention, many times faster than the same sums as torch ops,
and norms and rotations of a few rows, whose many small torch ops cost more than their sums.

A token of attention is computed from its query and the cached positions up to its own, in their order, and from nothing
else, so the batch and the cut of a prompt into chunks cannot change a bit of it. LLVM does not reorder floating-point
sums. Norms and rotations give the bits of the torch ops in ``dense.py``, which compute them without numba and for
16-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import PagedQueries

_DTYPES = frozenset({torch.float32, torch.float64})  # NumPy has no bfloat16


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None] | None:
    """The function as machine code, which numba stores beside the source or in the user's cache folder; None without
    numba, whose import takes a quarter of a second."""
    try:
        from numba import njit
    except ImportError:
        return None
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(function, cache=True, **options)  # type: ignore[no-any-return]
    except RuntimeError:  # both folders are read-only
        return njit(function, **options)  # type: ignore[no-any-return]


def attention_on_host(paged: PagedQueries, extend_lens: Tensor, scale: float) -> Tensor | None:
    """``attention.attended`` of host tensors: [T, heads · d], or None where it cannot be compiled."""
    q, k_cache, v_cache, table, rows, seq_lens = paged
    attend = _compiled(_attend)
    if attend is None:
        return None
    if q.dtype not in _DTYPES:  # what is read of the caches, in float32
        slots = table[rows, : max([1, *seq_lens.tolist()])]
        k_cache, v_cache = (cache[slots.flatten()].float() for cache in (k_cache, v_cache))
        table = torch.arange(slots.numel()).view_as(slots)
        rows = torch.arange(slots.shape[0])
    queries = q.to(k_cache.dtype).contiguous()
    out = torch.zeros_like(queries)
    attend(
        queries.numpy(),
        k_cache.numpy(),
        v_cache.numpy(),
        table.numpy(),
        *(x.to(torch.int64).contiguous().numpy() for x in (rows, seq_lens, extend_lens)),
        queries.numpy().dtype.type(scale),
        out.numpy(),
    )
    return out.flatten(1).to(q.dtype)


def _attend(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    rows: Any,
    seq_lens: Any,
    extend_lens: Any,
    scale: Any,
    out: Any,
) -> None:
    """Arrays of the shapes in ``attention.PagedQueries``. ``out`` has the shape of q [T, heads, d].

    As on a device, an index out of range reads something instead of failing.
    """
    tokens, heads, head_dim = q.shape
    capacity, kv_heads, _ = k_cache.shape
    context, group = req_to_token.shape[1], heads // kv_heads
    # The sums over positions are the long ones, and are wider than the operands.
    longest = 1
    for length in seq_lens:
        longest = max(longest, min(length, context))
    slots = np.empty(longest, np.int64)
    keys = np.empty((head_dim, longest), q.dtype)
    scores, value = np.empty(longest, q.dtype), np.empty(head_dim, np.float64)
    first = 0
    for b in range(len(seq_lens)):
        row, length = req_to_token[rows[b] % len(req_to_token)], min(max(seq_lens[b], 1), context)
        for j in range(length):
            slots[j] = min(max(row[j], 0), capacity - 1)
        last = min(first + max(extend_lens[b], 0), tokens)
        for h in range(kv_heads):
            for j in range(length):
                key = k_cache[slots[j], h]
                for c in range(head_dim):
                    keys[c, j] = key[c]
            for token in range(first, last):
                seen = max(length - (last - token) + 1, 1)
                for head in range(h * group, (h + 1) * group):
                    query, result = q[token, head], out[token, head]
                    scores[:seen] = 0
                    for c in range(head_dim):
                        factor, column = query[c] * scale, keys[c]
                        for j in range(seen):
                            scores[j] += factor * column[j]
                    top = scores[:seen].max()
                    value[:] = 0
                    total = value[0]
                    for j in range(seen):
                        weight, row_of_v = np.exp(scores[j] - top), v_cache[slots[j], h]
                        total += weight
                        for c in range(head_dim):
                            value[c] += weight * row_of_v[c]
                    for c in range(head_dim):
                        result[c] = value[c] / total
        first = last


def normalised_on_host(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """``dense.normalised`` of host tensors x [rows, n] and weight [n]: [rows, n], or None where it cannot be
    compiled."""
    plain = x.dtype in _DTYPES and x.dtype == weight.dtype and x.dim() == 2 and x.is_contiguous()
    normalise = _compiled(_normalise) if plain else None
    if normalise is None:
        return None
    out, rows = torch.empty_like(x), x.numpy()
    constants = np.array((1, x.shape[1], eps), rows.dtype)
    terms = np.zeros(1 << (x.shape[1] - 1).bit_length(), rows.dtype)
    normalise(rows, weight.numpy(), constants, terms, out.numpy())
    return out


def _normalise(x: Any, weight: Any, constants: Any, terms: Any, out: Any) -> None:
    """``constants`` are 1, n and epsilon in the type of x, whose arithmetic an integer would widen. ``terms`` is memory
    for one row's squares, added in the order of ``invariant.halving_sum``; behind the first n they are zeros."""
    one, width, eps = constants
    count = x.shape[1]
    for row in range(len(x)):
        values, result = x[row], out[row]
        for c in range(count):
            terms[c] = values[c] * values[c]
        terms[count:] = 0
        half = len(terms) // 2
        while half:
            for c in range(half):
                terms[c] += terms[c + half]
            half //= 2
        scale = one / np.sqrt(terms[0] / width + eps)
        for c in range(count):
            result[c] = values[c] * scale * weight[c]


def rotated_on_host(x: Tensor, cos_sin: Tensor) -> Tensor | None:
    """``dense.rotated`` of host tensors x [T, heads, d] and cos_sin [T, d]: [T, heads, d], or None where it cannot be
    compiled."""
    rotate = _compiled(_rotate) if x.dtype in _DTYPES and x.dtype == cos_sin.dtype else None
    if rotate is None:
        return None
    out = x.new_empty(x.shape)
    rotate(x.numpy(), cos_sin.numpy(), out.numpy())
    return out


def _rotate(x: Any, cos_sin: Any, out: Any) -> None:
    half = x.shape[2] // 2
    for token in range(len(x)):
        angles = cos_sin[token]
        for head in range(x.shape[1]):
            values, result = x[token, head], out[token, head]
            for c in range(half):
                first, second, cos, sin = values[c], values[c + half], angles[c], angles[c + half]
                result[c] = first * cos - second * sin
                result[c + half] = second * cos + first * sin
