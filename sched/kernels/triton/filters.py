"""top-k and top-p without a sort: the threshold that a row's scaled logits have to reach to be kept.

The floats are compared as integers of the same order, and a search with sixteen probes at a time finds the lowest one
that passes. Of equals the first ids pass, as in a stable sort.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)  # logits processed together
_PLACES = tl.constexpr(16)


@triton.jit
def scaled_logits(logits, mask, at, vocab, temperature):
    """float32 of the ids ``at`` in one row; -inf where the row ends and where the ``mask`` of the row forbids."""
    valid = at < vocab
    if mask is not None:
        valid = valid & (((tl.load(mask + at // 32, mask=valid, other=0) >> (at % 32)) & 1) == 1)
    values = tl.load(logits + at, mask=valid, other=float("-inf")).to(tl.float32)
    # A greedy row is divided by 1; adding 0 turns -0.0 into 0.0.
    return values / tl.where(temperature > 0, temperature, 1.0) + 0.0


@triton.jit
def order(values):
    """int32 in the order of the float32 ``values``."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mass(values, top):
    return tl.exp(values - top)


@triton.jit
def _beyond(logits, mask, vocab, temperature, top, places):
    """The number of ids above each of ``places`` [16] int64, and their mass."""
    count = tl.zeros([_PLACES], tl.int32)
    mass = tl.zeros([_PLACES], tl.float64)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = scaled_logits(logits, mask, at, vocab, temperature)
        above = (order(values)[:, None] > places.to(tl.int32)[None, :]) & (at < vocab)[:, None]
        count += tl.sum(above.to(tl.int32), 0)
        mass += tl.sum(tl.where(above, _mass(values, top)[:, None], 0.0), 0).to(tl.float64)
    return count, mass


@triton.jit
def _summed_up(logits, mask, vocab, temperature):
    """The largest of a row, and its mass."""
    top = tl.full([], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(scaled_logits(logits, mask, at, vocab, temperature), 0))
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = scaled_logits(logits, mask, at, vocab, temperature)
        total += tl.sum(_mass(values, top), 0).to(tl.float64)
    return top, total


@triton.jit
def _last_equal(logits, mask, vocab, temperature, bar, admitted):
    """The id of the last of the ``admitted`` first ids that are equal to ``bar``; -1 where there are none."""
    last = tl.full([], -1, tl.int32)
    found = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        equal = (order(scaled_logits(logits, mask, at, vocab, temperature)) == bar) & (at < vocab)
        nth = found + tl.cumsum(equal.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(equal & (nth <= admitted), at, -1), 0))
        found = tl.max(nth, 0)
    return last


@triton.jit(
    do_not_specialize=["strides", "stride", "words", "vocab"],
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "lasts"],
)
def find_bars(
    logits, mask, temperatures, top_ks, top_ps, bars, lasts, tops, strides, stride, words, vocab
) -> None:
    """Finds the thresholds of each row: ids above ``bars`` are kept, and those equal to it up to ``lasts``; ``tops`` is
    the largest logit. Rows of temperatures, top_ks and top_ps are ``strides`` apart."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    if mask is not None:
        mask += row * words
    temperature = tl.load(temperatures + row * strides[0])
    top_k = tl.load(top_ks + row * strides[1])
    top_p = tl.load(top_ps + row * strides[2]).to(tl.float64)
    top, total = _summed_up(logits, mask, vocab, temperature)
    enough = tl.where(top_p >= 1, float("inf"), top_p * total)
    bar = tl.full([], -2147483648, tl.int64)
    for nibble in range(8):
        size = tl.full([], 1, tl.int64) << (28 - 4 * nibble)
        places = bar + (tl.arange(0, _PLACES) + 1) * size - 1
        count, mass = _beyond(logits, mask, vocab, temperature, top, places)
        short = (count >= top_k) | (mass >= enough)
        bar += tl.minimum(tl.sum(short.to(tl.int64), 0), 15) * size
    bar = tl.minimum(bar, order(top).to(tl.int64))
    count, mass = _beyond(logits, mask, vocab, temperature, top, bar + tl.zeros([_PLACES], tl.int64))
    bits = bar.to(tl.int32)
    least = _mass((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), top).to(tl.float64)
    missing = tl.where(least > 0, tl.ceil((enough - tl.max(mass, 0)) / least), float("inf"))
    by_mass = tl.minimum(missing, 1073741824.0).to(tl.int32)
    admitted = tl.maximum(tl.minimum(top_k - tl.max(count, 0), by_mass), 1)
    tl.store(bars + row, bits)
    tl.store(lasts + row, _last_equal(logits, mask, vocab, temperature, bits, admitted))
    tl.store(tops + row, top)
