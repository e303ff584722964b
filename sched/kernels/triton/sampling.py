"""Sampling without a sort and without the host: each row's vocabulary is searched in splits.

top-k and top-p need the threshold that a row's scaled logits have to reach to be kept. The floats are compared as
integers of the same order, and a search with sixteen probes at a time finds the lowest one that passes. Of equals the
first ids pass, as in a stable sort.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling import Draw

BLOCK = tl.constexpr(1024)  # logits processed together
MOST_SPLITS = 64
_PLACES = tl.constexpr(16)
_PROGRAMS = 1024  # enough to keep every multiprocessor of today's GPUs busy


@triton.jit
def _scaled_logits(logits, mask, at, vocab, temperature):
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
        values = _scaled_logits(logits, mask, at, vocab, temperature)
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
        top = tl.maximum(top, tl.max(_scaled_logits(logits, mask, at, vocab, temperature), 0))
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = _scaled_logits(logits, mask, at, vocab, temperature)
        total += tl.sum(_mass(values, top), 0).to(tl.float64)
    return top, total


@triton.jit
def _last_equal(logits, mask, vocab, temperature, bar, admitted):
    """The id of the last of the ``admitted`` first ids that are equal to ``bar``; -1 where there are none."""
    last = tl.full([], -1, tl.int32)
    found = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        equal = (order(_scaled_logits(logits, mask, at, vocab, temperature)) == bar) & (at < vocab)
        nth = found + tl.cumsum(equal.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(equal & (nth <= admitted), at, -1), 0))
        found = tl.max(nth, 0)
    return last


@triton.jit(
    do_not_specialize=["strides", "stride", "words", "vocab"],
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "lasts"],
)
def _find_bars(
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


class _Best(NamedTuple):
    """The best of each split of b rows, [b, splits] each; only scores need ``seconds``, ``tops`` and ``masses``."""

    scores: Tensor  # float32, the best
    ids: Tensor  # int32
    seconds: Tensor | None  # float32, the best but one
    tops: Tensor | None  # float32, the largest scaled logit, filters or not
    masses: Tensor | None  # float32, sum of exp(scaled logit - top)


@triton.jit
def _kept(values, at, row, bars, lasts, tops, min_p):
    """Whether the ids ``at`` pass the filters."""
    bar, last, top = tl.load(bars + row), tl.load(lasts + row), tl.load(tops + row)
    place = order(values)
    likely = (tl.exp(values - top) >= min_p) | (values == top)
    return ((place > bar) | ((place == bar) & (at <= last))) & likely


@triton.jit
def exp_difference(old, new):
    """exp(old - new), 0 where both are -inf."""
    return tl.where(old == float("-inf"), 0.0, tl.exp(old - new))


@triton.jit
def add_mass(top, mass, values):
    """The running maximum and sum of exp(value - maximum), updated by ``values``."""
    higher = tl.maximum(top, tl.max(values, 0))
    return higher, mass * exp_difference(top, higher) + tl.sum(exp_difference(values, higher), 0)


@triton.jit
def _best_two(best, second, ids):
    """Of all lanes: the largest, the lowest id that has it, and the largest of the others."""
    largest = tl.max(best, 0)
    winner = tl.min(tl.where(best == largest, ids, 2147483647), 0)
    # Lanes have distinct ids unless nothing was found, and then the others are no worse.
    others = tl.where((best == largest) & (ids == winner), second, best)
    return largest, winner, tl.max(others, 0)


@triton.jit(
    do_not_specialize=["strides", "stride", "words", "vocab", "size"],
    do_not_specialize_on_alignment=[
        *("temperatures", "seeds", "positions", "min_ps"),
        *("lasts", "seconds", "tops", "masses"),
    ],
)
def _draw(
    logits,
    mask,
    temperatures,
    seeds,
    positions,
    min_ps,
    bars,
    lasts,
    row_tops,
    scores,
    ids,
    seconds,
    tops,
    masses,
    strides,
    stride,
    words,
    vocab,
    size,
) -> None:
    """Finds the best of ``size`` ids. Without ``temperatures`` greedy; without ``bars`` unfiltered. ``strides`` are
    those of the rows of temperatures, seeds, positions and min_ps."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = 0.0 if temperatures is None else tl.load(temperatures + row * strides[0])
    if seeds is not None:
        low, high = _noise_key(tl.load(seeds + row * strides[1]), tl.load(positions + row * strides[2]))
    if bars is not None:
        min_p = tl.load(min_ps + row * strides[3])
    if mask is not None:
        mask += row * words
    begins = split * size
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    winner = begins + tl.arange(0, BLOCK)
    top = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float32)
    for first in range(begins, tl.minimum(begins + size, vocab), BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = _scaled_logits(logits + row * stride, mask, at, vocab, temperature)
        if tops is not None:
            top, mass = add_mass(top, mass, values)
        score = values
        if seeds is not None:
            score += tl.where(temperature > 0, _gumbel_noise(low, high, at), 0.0)
        if bars is not None:
            score = tl.where(_kept(values, at, row, bars, lasts, row_tops, min_p), score, float("-inf"))
        better = score > best
        second = tl.where(better, best, tl.maximum(second, score))
        winner = tl.where(better, at, winner)
        best = tl.where(better, score, best)
    place = row * tl.num_programs(1) + split
    largest, lowest, other = _best_two(best, second, winner)
    tl.store(scores + place, largest)
    tl.store(ids + place, lowest)
    if tops is not None:
        tl.store(seconds + place, other)
        tl.store(tops + place, top)
        tl.store(masses + place, mass)


@triton.jit(do_not_specialize=["splits"])
def _take(scores, ids, out, splits, most: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, most)
    valid = split < splits
    best = tl.load(scores + row * splits + split, mask=valid, other=float("-inf"))
    winner = tl.load(ids + row * splits + split, mask=valid, other=2147483647)
    _largest, lowest, _other = _best_two(best, best, winner)
    tl.store(out + row, lowest.to(tl.int64))


@triton.jit(
    do_not_specialize=["splits", "temperature_stride", "stride", "words", "vocab"],
    do_not_specialize_on_alignment=["temperatures", "seconds", "tops", "masses", "margins"],
)
def _score(
    logits,
    mask,
    temperatures,
    ids,
    scores,
    winners,
    seconds,
    tops,
    masses,
    logprobs,
    margins,
    splits,
    temperature_stride,
    stride,
    words,
    vocab,
    most: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, most)
    valid, place = split < splits, row * splits + split
    best = tl.load(scores + place, mask=valid, other=float("-inf"))
    second = tl.load(seconds + place, mask=valid, other=float("-inf"))
    winner = tl.load(winners + place, mask=valid, other=2147483647)
    top = tl.load(tops + place, mask=valid, other=float("-inf"))
    largest, _lowest, other = _best_two(best, second, winner)
    temperature = tl.load(temperatures + row * temperature_stride)
    tl.store(margins + row, (largest - other) * tl.where(temperature > 0, temperature, 1.0))
    highest = tl.max(top, 0)
    mass = tl.sum(tl.load(masses + place, mask=valid, other=0.0) * exp_difference(top, highest), 0)
    if mask is not None:
        mask += row * words
    chosen = tl.load(ids + row) + tl.zeros([1], tl.int64)
    value = tl.max(_scaled_logits(logits + row * stride, mask, chosen, vocab, temperature), 0)
    tl.store(logprobs + row, value - highest - tl.log(mass))


def _bars(draw: Draw) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """The results of ``_find_bars`` for b rows, [b] each: bars and lasts int32, tops float32."""
    if not draw.filtered:
        return None, None, None
    b, vocab = draw.logits.shape
    bars, lasts = torch.empty((2, b), dtype=torch.int32, device=draw.logits.device).unbind()
    tops = torch.empty(b, dtype=torch.float32, device=draw.logits.device)
    rows = (draw.logits, draw.vocab_mask, draw.temperatures, draw.top_ks, draw.top_ps)
    sizes = (
        tuple(part.stride(0) for part in rows[2:]),
        draw.logits.stride(0),
        _words(draw.vocab_mask),
        vocab,
    )
    _find_bars[(b,)](*rows, bars, lasts, tops, *sizes, num_warps=8)
    return bars, lasts, tops


def _words(mask: Tensor | None) -> int:
    return 0 if mask is None else mask.shape[1]


def splits_of(logits: Tensor) -> tuple[int, int]:
    """How many splits a row has, and ids in each."""
    b, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK.value)
    each = triton.cdiv(blocks, min(max(_PROGRAMS // b, 1), MOST_SPLITS))
    return triton.cdiv(blocks, each), each * BLOCK.value


def _searched(logits: Tensor, mask: Tensor | None, draw: Draw | None, *, scored: bool = False) -> _Best:
    """The best of each split, greedy without a ``draw``."""
    b, vocab = logits.shape
    splits, size = splits_of(logits)
    floats = torch.empty((4, b, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((b, splits), dtype=torch.int32, device=logits.device)
    best = _Best(floats[0], ids, *(floats[1:] if scored else (None, None, None)))
    keys: tuple[Tensor | None, ...] = (None,) * 7
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if draw is not None:
        rows = (draw.temperatures, draw.seeds, draw.positions, draw.min_ps)
        keys, strides = (*rows, *_bars(draw)), tuple(part.stride(0) for part in rows)
    _draw[(b, splits)](logits, mask, *keys, *best, strides, logits.stride(0), _words(mask), vocab, size)
    return best


def _taken(best: _Best) -> Tensor:
    b, splits = best.scores.shape
    out = torch.empty(b, dtype=torch.int64, device=best.scores.device)
    _take[(b,)](best.scores, best.ids, out, splits, MOST_SPLITS, num_warps=1)
    return out


def sample_greedy(logits, vocab_mask):
    if not logits.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    return _taken(_searched(logits, vocab_mask, None))


def sample(draw):
    if not draw.logits.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=draw.logits.device)
    return _taken(_searched(draw.logits, draw.vocab_mask, draw))


def score_tokens(draw, ids):
    logits, mask, temperatures = draw.logits, draw.vocab_mask, draw.temperatures
    b, vocab = logits.shape
    logprobs, margins = torch.empty((2, b), dtype=torch.float32, device=logits.device).unbind()
    if b:
        best = _searched(logits, mask, draw, scored=True)
        strides = (temperatures.stride(0), logits.stride(0), _words(mask))
        sizes = (best.scores.shape[1], *strides, vocab, MOST_SPLITS)
        _score[(b,)](logits, mask, temperatures, ids, *best, logprobs, margins, *sizes, num_warps=1)
    return logprobs, margins


@triton.jit
def _noise_key(seed, position):
    """Low and high word, uint32, of a row's key."""
    word = (seed + (position + 1) * -7046029254386353131).to(tl.uint64, bitcast=True)
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def _mix32(word):
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _gumbel_noise(low, high, ids):
    """float32 noise for each of ``ids``. A small u needs a series, since 1 - u would lose its last digits."""
    word = _mix32(_mix32(ids.to(tl.uint32) + low) ^ high) & 0x7FFFFFFF
    u = tl.minimum(
        word.to(tl.float32) * 0.0000000004656612873077393 + 0.00000000023283064365386963, 0.99999994
    )
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))
