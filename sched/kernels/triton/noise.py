"""The keyed noise of ``kernels.sampling``: the same words, and the same numbers but for the last places."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_key(seed, position):
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
def gumbel_noise(low, high, ids):
    """float32 noise for each of ``ids``. A small u needs a series, since 1 - u would lose its last digits."""
    word = _mix32(_mix32(ids.to(tl.uint32) + low) ^ high) & 0x7FFFFFFF
    u = tl.minimum(
        word.to(tl.float32) * 0.0000000004656612873077393 + 0.00000000023283064365386963, 0.99999994
    )
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))
