"""KV between hot buffers and pinned host memory, which kernels read and write directly, the plan of a swap-in, and the
bookkeeping of hot buffers, each op one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # slots of a buffer, or elements of a token, that are processed together, at most
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


def swap_in(fetch):
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


def back_up(k_cache, v_cache, host, slots, host_slots):
    """All layers in one launch: their addresses are arguments of the kernel."""
    if n := slots.shape[0]:
        size = k_cache[0].shape[1] * k_cache[0].shape[2]
        sizes = (n, len(k_cache), size, min(_BLOCK, triton.next_power_of_2(size)))
        _back_up[(min(n, _SAVERS),)](tuple(k_cache), tuple(v_cache), host, slots, host_slots, *sizes)


@triton.jit
def _place_of(token, positions, k, steps: tl.constexpr):
    """For each ``token`` its place among the ``positions`` [k], ascending with -1 behind them; k where it is none."""
    low = token * 0
    high = low + k
    for _ in tl.static_range(steps):
        middle = (low + high) // 2
        value = tl.load(positions + middle, mask=middle < k, other=-1)
        before = (middle < high) & (value >= 0) & (value < token)
        high = tl.where(before, high, middle)
        low = tl.where(before, middle + 1, low)
    found = tl.load(positions + low, mask=low < k, other=-1) == token
    return tl.where(found, low, k)


@triton.jit
def _find(
    positions, tokens, held, flags, newest, k, size: tl.constexpr, steps: tl.constexpr, block: tl.constexpr
) -> None:
    """Writes the slot of each chosen position that is in the buffer to ``held`` [k], and marks these slots in
    ``flags``."""
    for first in range(0, k, block):
        at = first + tl.arange(0, block)
        tl.store(held + at, tl.full([block], -1, tl.int32), mask=at < k)
    tl.debug_barrier()
    for first in range(0, size, block):
        slot = first + tl.arange(0, block)
        token = tl.load(tokens + slot, mask=slot < size, other=-1)
        place = _place_of(token, positions, k, steps)
        hit = (slot < size) & (place < k) & (token != newest)
        tl.store(held + place, slot, mask=hit)
        tl.store(flags + slot, hit.to(tl.int8), mask=slot < size)
    tl.debug_barrier()


@triton.jit
def _counted(positions, held, newest, k, block: tl.constexpr):
    """The number of positions that are looked up, and of those that are not in the buffer."""
    asked, missed = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, k, block):
        at = first + tl.arange(0, block)
        position = tl.load(positions + at, mask=at < k, other=-1)
        look = (position >= 0) & (position != newest)
        lost = look & (tl.load(held + at, mask=at < k, other=0) < 0)
        asked += tl.sum(look.to(tl.int32), 0)
        missed += tl.sum(lost.to(tl.int32), 0)
    return asked, missed


@triton.jit
def _reorder(lru, flags, reordered, freed, hits, misses, size: tl.constexpr, block: tl.constexpr) -> None:
    """Writes the first ``misses`` unused slots of the order to ``freed``, and the new order: the unused slots that are
    left, then the freed, then the hit."""
    stale = size - hits - misses
    free_before, used_before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, size, block):
        at = first + tl.arange(0, block)
        valid = at < size
        slot = tl.load(lru + at, mask=valid, other=0).to(tl.int32)
        used = valid & (tl.load(flags + slot, mask=valid, other=0) != 0)
        free = valid & ~used
        nth_free = free_before + tl.cumsum(free.to(tl.int32), 0) - 1
        nth_used = used_before + tl.cumsum(used.to(tl.int32), 0) - 1
        tl.store(freed + nth_free, slot, mask=free & (nth_free < misses))
        unused = tl.where(nth_free < misses, stale + nth_free, nth_free - misses)
        place = tl.where(used, stale + misses + nth_used, unused)
        tl.store(reordered + place, slot.to(tl.int16), mask=valid)
        free_before, used_before = tl.max(nth_free, 0) + 1, tl.max(nth_used, 0) + 1
    tl.debug_barrier()
    for first in range(0, size, block):
        at = first + tl.arange(0, block)
        tl.store(lru + at, tl.load(reordered + at, mask=at < size, other=0), mask=at < size)


@triton.jit
def _write_plan(
    positions,
    held,
    freed,
    buffer,
    tokens,
    locations,
    missing,
    targets,
    newest,
    k,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Writes the plan of one request, and the missing positions to the buffer's ``tokens``."""
    missed_before = tl.full([], 0, tl.int32)
    for first in range(0, k, block):
        at = first + tl.arange(0, block)
        valid = at < k
        position = tl.load(positions + at, mask=valid, other=-1)
        present = position >= 0
        # The last comparison is made a block, since the interpreter accepts no scalar mask.
        look = present & (position != newest) & (newest - 0 * position >= size)
        slot = tl.load(held + at, mask=look, other=-1)
        miss = look & (slot < 0)
        nth = missed_before + tl.cumsum(miss.to(tl.int32), 0) - 1
        missed_before = tl.max(nth, 0) + 1
        fresh = tl.load(freed + nth, mask=miss, other=0)
        slot = tl.where(look, tl.where(miss, fresh, slot), tl.minimum(position, size))
        location = tl.load(buffer + slot, mask=present, other=0).to(tl.int32)
        tl.store(locations + at, location, mask=valid)
        tl.store(missing + at, tl.where(miss, position, -1), mask=valid)
        tl.store(targets + at, tl.where(miss, location, 0), mask=valid)
        tl.store(tokens + slot, position, mask=miss)


@triton.jit(do_not_specialize=["k", "width"], do_not_specialize_on_alignment=["rows", "seq_lens"])
def _plan(
    positions,
    rows,
    seq_lens,
    device_buffer,
    tokens,
    lru,
    lookups,
    locations,
    missing,
    targets,
    held,
    freed,
    flags,
    reordered,
    k,
    width,
    size: tl.constexpr,
    steps: tl.constexpr,
    block: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    length = tl.load(seq_lens + request).to(tl.int32)
    positions += request * k
    held += request * k
    freed += request * k
    tokens += row * size
    if length > size:
        _find(positions, tokens, held, flags + request * size, length - 1, k, size, steps, block)
        asked, missed = _counted(positions, held, length - 1, k, block)
        tl.atomic_add(lookups, asked.to(tl.int64))
        tl.atomic_add(lookups + 1, missed.to(tl.int64))
        order, scratch = lru + row * size, reordered + request * size
        _reorder(order, flags + request * size, scratch, freed, asked - missed, missed, size, block)
        tl.debug_barrier()
    plan = request * k
    buffer = device_buffer + row * width
    _write_plan(
        positions,
        held,
        freed,
        buffer,
        tokens,
        locations + plan,
        missing + plan,
        targets + plan,
        length - 1,
        k,
        size,
        block,
    )


def plan_swap_in(lookup):
    *tables, _ = lookup
    (b, k), size, device = lookup.positions.shape, lookup.lru.shape[1], lookup.positions.device
    locations, missing, targets, held, freed = torch.empty((5, b, k), dtype=torch.int32, device=device)
    flags = torch.empty((b, size), dtype=torch.int8, device=device)
    reordered = torch.empty((b, size), dtype=torch.int16, device=device)
    plan = (locations, missing, targets)
    if b:
        sizes = (k, lookup.device_buffer.shape[1], size, k.bit_length() + 1, _BLOCK)
        _plan[(b,)](*tables, *plan, held, freed, flags, reordered, *sizes, num_warps=8)
    return plan


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
