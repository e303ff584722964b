"""A shadow of the KV cache in integers, which reveals a wrong token, length, slot or page.

Every slot holds two numbers modulo 2^64 in place of the keys and values of a position p::

    tag(p) = tag(p-1) + mix(token, p)         the prefix, as one number
    sum(p) = sum(p-1) + weight(p) · tag(p)    all tags of the prefix, each at its position

The predecessor is found through the page table, as attention would find it, and both are plain sums, so
every way of cutting a prompt gives the same numbers. Gathering, weighting and adding all tags of a
request gives the ``sum`` at its last position, unless some slot has been overwritten. Weights differ by
position, so that two exchanged slots are detected as well.

Only an emulated device goes without values, so the tensors here always lie in the host's memory.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .arrays import ONE, ZERO, clipped, kept_array, kept_words, row_starts
from .declare import Written, kernel, meta_like, meta_tensor
from .sparse import ABSENT, PADDING, entries_at

Words = NDArray[np.uint64]
Indices = NDArray[np.integer]

ROTATION = 16  # a request growing by one token is gathered in full at every 16th length


def _constants(*numbers: int) -> list[Words]:
    """As ``ONE``."""
    return [np.array(number, dtype=np.uint64) for number in numbers]


_TOKEN, _POSITION, _DRIFT = _constants(0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7)
_FIRST, _SECOND = _constants(0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_30, _27, _31 = _constants(30, 27, 31)
_ROTATION = np.array(ROTATION, dtype=np.int64)


def mixed(x: Words) -> Words:
    """A bijective hash of 64 bits, in place (splitmix64's finaliser)."""
    x ^= x >> _30
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> _31
    return x


def position_weights(count: int) -> Tensor:
    """[count] int64: the weight of each position's tag. All are odd, so that no bit of a tag is lost."""
    weights = mixed(np.arange(1, count + 1, dtype=np.uint64) * _DRIFT) | np.uint64(1)
    return torch.from_numpy(weights.view(np.int64))


def gathered(tags: Tensor, weights: Tensor, slots: Indices) -> int:
    """Weighted sum modulo 2^64 of the tags in ``slots`` [n], which are those of positions 0 to n-1."""
    return int(_gathered(kept_words(tags), kept_words(weights), slots))


def _gathered(tags: Words, weights: Words, slots: Indices) -> np.uint64:
    total: np.uint64 = tags.take(slots, mode="clip").dot(weights[: len(slots)])
    return total


def _put(x: Words, places: Indices, values: Words) -> None:
    """``x[places] = values``; a place out of range is something's."""
    try:
        x[places] = values
    except IndexError:
        x.put(places, values, mode="clip")


def _positions(first: Indices, new: Indices, num_tokens: int) -> Indices:
    """Positions of the ``new`` [b] tokens of each request, one request after the other; ``first`` [b] if each has
    one."""
    if num_tokens == len(first):
        return first
    shifts: Indices = np.repeat(first + new - np.cumsum(new), new)
    return shifts + np.arange(num_tokens)


def _running(terms: Words, before: Words, new: Indices) -> Words:
    """Running sums of each request's terms [T], from its value ``before`` [b]."""
    if len(terms) == len(before):
        return before + terms
    sums, ends = np.cumsum(terms), np.cumsum(new)
    start = ends - new
    base: Words = before - (sums[start] - terms[start])
    return sums + np.repeat(base, new)


@kernel(meta=lambda req_pool_indices: meta_tensor(req_pool_indices.shape[0]), cost=None)
def kv_tags(
    tags: Written,
    sums: Written,
    weights: Tensor,
    input_ids: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor | None,
    out_cache_loc: Tensor,
) -> Tensor:
    """Writes the new tokens' tags and sums and returns each request's fingerprint, [b] int64.

    ``tags`` and ``sums`` are [slots] int64, ``weights`` [context] int64; the rest is a ForwardBatch's. A
    fingerprint is the last position's tag, read back through the page table, and the difference between the
    gathered and the stored sum. The difference is 0 in a correct program, so computing it for a sample suffices: it
    is computed whenever more than one token is new, and for one sixteenth of the others.

    As on a device, an index out of range reads something instead of failing.
    """
    tag, total, weight = kept_words(tags), kept_words(sums), kept_words(weights)
    table, rows, lens = kept_array(req_to_token), kept_array(req_pool_indices), kept_array(seq_lens)
    slots = kept_array(out_cache_loc)
    new = ONE if extend_lens is None else extend_lens.numpy().astype(np.int64)
    flat, starts = table.reshape(-1), clipped(row_starts(req_to_token), rows) - ONE
    first = lens - new
    before = clipped(flat, starts + first).astype(np.int64)  # other indices are converted at every use
    positions = _positions(first, new, input_ids.shape[0])
    prefix, prefix_sum = clipped(tag, before), clipped(total, before)
    prefix_lens = first.tolist()
    if prefix_lens and min(prefix_lens) <= 0:  # a request without a prefix begins with 0
        prefix[first <= ZERO] = prefix_sum[first <= ZERO] = 0

    # The offset keeps token 0 at position 0 from hashing to 0, the value of a slot that was never written.
    terms = mixed(kept_words(input_ids) * _TOKEN + positions.view(np.uint64) * _POSITION + _TOKEN)
    new_tags = _running(terms, prefix, new)
    new_sums = _running(new_tags * clipped(weight, positions), prefix_sum, new)
    _put(tag, slots, new_tags)
    _put(total, slots, new_sums)

    last = clipped(flat, starts + lens)
    result = clipped(tag, last)
    sampled = (rows + lens) % _ROTATION == ZERO
    chosen = (sampled if extend_lens is None else sampled | (new > 1)).nonzero()[0]
    if len(chosen):
        places = zip(rows[chosen].tolist(), lens[chosen].tolist(), strict=True)
        sums_of = [_gathered(tag, weight, table[row % len(table), :length]) for row, length in places]
        stored = total.take(last[chosen], mode="clip")
        if sums_of != stored.tolist():
            result[chosen] += (np.array(sums_of, dtype=np.uint64) - stored) * _DRIFT
    return torch.from_numpy(mixed(result).view(np.int64))


@kernel(meta=lambda input_ids: meta_like(input_ids), cost=None)
def sent_ids(input_ids: Tensor) -> Tensor:
    """A copy of the ids [T] for the next pipeline stage, which belongs to the stream that sends it."""
    return input_ids.clone()


# ---- KV that is partly on the host -----------------------------------------------------------------------------

# The tags above belong to logical slots and follow tokens, lengths and the page table. The following ones belong to
# memory slots on the device and on the host: every kernel that moves KV moves them, and a wrong slot shows as a
# difference of the two when it is attended to.
_TIER_DRIFT = -0x61C8864680B583EB  # odd, as an int64


@kernel(cost=None)
def move_tags(target: Written, target_slots: Tensor, source: Tensor, source_slots: Tensor) -> None:
    """``target[target_slots] = source[source_slots]``; a source slot that is ABSENT goes to the padding."""
    absent = source_slots == ABSENT
    slots = target_slots.where(~absent, PADDING).flatten().to(torch.int64)
    target.index_copy_(0, slots, source[source_slots.clamp(min=0).flatten().to(torch.int64)])


@kernel(cost=None)
def fetch_tags(
    device_tags: Written,
    host_tags: Tensor,
    host_slots: Tensor,
    req_pool_indices: Tensor,
    missing: Tensor,
    targets: Tensor,
) -> None:
    """Moves tags as ``swap_in`` moves KV."""
    places = entries_at(host_slots, req_pool_indices, missing).flatten()
    device_tags.index_copy_(0, targets.flatten().to(torch.int64), host_tags[places])


@kernel(cost=None)
def misplaced(
    fingerprint: Written,  # [b] int64
    device_tags: Tensor,
    tags: Tensor,  # of logical slots
    weights: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,  # [b]
    positions: Tensor,  # [b, k], the chosen ones
    locations: Tensor,  # [b, k], where they were read
) -> None:
    """Changes the fingerprint of a request if one of the ``locations`` that it has attended to has another tag than the
    page table gives the position; each difference is multiplied by the position's weight."""
    where = positions.clamp(min=0).to(torch.int64)
    slots = req_to_token[req_pool_indices.unsqueeze(1), where].to(torch.int64)
    differ = (device_tags[locations.to(torch.int64)] - tags[slots]) * weights[where]
    fingerprint += differ.masked_fill(positions == ABSENT, 0).sum(1) * _TIER_DRIFT
