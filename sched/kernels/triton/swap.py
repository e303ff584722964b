"""KV between hot buffers and pinned host memory, which kernels read and write directly."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..swap import Fetch

_BLOCK = 1024  # elements of a token moved together, at most
_FETCHERS = 256  # programs that wait for the bus at once, at least
_SAVERS = 16  # programs of a backup, few enough for other streams' kernels to run beside it


@triton.jit
def _move(source, target, size: tl.constexpr, block: tl.constexpr) -> None:
    for first in tl.static_range(0, size, block):
        at = first + tl.arange(0, block)
        tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


@triton.jit(do_not_specialize=["k", "context", "stride"], do_not_specialize_on_alignment=["rows"])
def _swap_in(
    k_cache,
    v_cache,
    host,
    host_slots,
    rows,
    missing,
    targets,
    k,
    context,
    stride,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Tokens of ``size`` elements in either cache; on the host they are ``stride`` elements apart."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    for place in range(tl.program_id(1), k, tl.num_programs(1)):
        position = tl.load(missing + request * k + place)
        if position >= 0:
            source = host + tl.load(host_slots + row * context + position) * stride
            slot = tl.load(targets + request * k + place).to(tl.int64)
            _move(source, k_cache + slot * size, size, block)
            _move(source + size, v_cache + slot * size, size, block)


def swap_in(fetch: Fetch) -> None:
    k_cache, v_cache, host, host_slots, req_pool_indices, missing, targets = fetch
    b, k = missing.shape
    if not b:
        return
    size = k_cache.shape[1] * k_cache.shape[2]
    grid = (b, min(max(_FETCHERS // b, 8), k))
    tables = (host_slots, req_pool_indices, missing, targets, k, host_slots.shape[1], host.stride(0))
    _swap_in[grid](k_cache, v_cache, host, *tables, size, min(_BLOCK, triton.next_power_of_2(size)))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["slots", "host_slots"])
def _back_up(
    k_cache,
    v_cache,
    host,
    slots,
    host_slots,
    n,
    layers: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    for place in range(tl.program_id(0), n, tl.num_programs(0)):
        slot = tl.load(slots + place).to(tl.int64)
        if slot >= 0:
            target = host + tl.load(host_slots + place).to(tl.int64) * layers * 2 * size
            for layer in tl.static_range(layers):
                _move(k_cache[layer] + slot * size, target + 2 * layer * size, size, block)
                _move(v_cache[layer] + slot * size, target + (2 * layer + 1) * size, size, block)


def back_up(
    k_cache: Sequence[Tensor], v_cache: Sequence[Tensor], host: Tensor, slots: Tensor, host_slots: Tensor
) -> None:
    """All layers in one launch: their addresses are arguments of the kernel."""
    if n := slots.shape[0]:
        size = k_cache[0].shape[1] * k_cache[0].shape[2]
        sizes = (n, len(k_cache), size, min(_BLOCK, triton.next_power_of_2(size)))
        _back_up[(min(n, _SAVERS),)](tuple(k_cache), tuple(v_cache), host, slots, host_slots, *sizes)
