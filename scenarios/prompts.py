"""The token ids of prompts: a hash of (seed, random stream, key, position), so that any prompt can be built alone, at
any time, and equal keys give equal tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from .distributions import Counts

BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for
_WEYL = np.uint64(0x9E3779B97F4A7C15)


class RandomStream(IntEnum):
    """The independent streams of random numbers of a workload, by their use."""

    PROMPT_TOKENS = 0
    OUTPUT_TOKENS = 1
    ARRIVAL = 2
    GROUP = 3
    ABORT = 4
    PROMPT = 5
    PREFIX = 6
    BLOCK = 7
    ENCODER = 8
    ENCODER_TOKENS = 9


def stream(seed: int, purpose: RandomStream) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose,)))


def text(seed: int, purpose: RandomStream, *, key: int, length: int, vocab_size: int) -> Counts:
    """The ``length`` token ids of one text, [length] int64 in [0, vocab_size)."""
    tokens: Counts = _tokens(_keys(seed, purpose, ids=[key]), length=length, vocab_size=vocab_size)[0]
    return tokens


def blocks(seed: int, hash_ids: Sequence[int], *, length: int, vocab_size: int) -> Counts:
    """A prompt of ``length`` tokens made of Mooncake's blocks; the last one is cut. [length] int64."""
    keys = _keys(seed, RandomStream.BLOCK, ids=hash_ids)
    tokens: Counts = _tokens(keys, length=BLOCK, vocab_size=vocab_size).reshape(-1)
    return tokens[:length]


def packed(tokens: Counts) -> array[int]:
    """As the array('q') that a Request holds."""
    return array("q", tokens.astype(np.int64, copy=False).tobytes())


def _keys(seed: int, purpose: RandomStream, *, ids: Sequence[int]) -> NDArray[np.uint64]:
    return _mixed(_stream_key(seed, purpose) + np.array(ids, dtype=np.uint64))


@cache
def _stream_key(seed: int, purpose: RandomStream) -> NDArray[np.uint64]:
    """[1]."""
    return _mixed(_mixed(np.array([seed], dtype=np.uint64)) + np.uint64(purpose))


@lru_cache(maxsize=64)
def _positions(length: int) -> NDArray[np.uint64]:
    return np.arange(1, length + 1, dtype=np.uint64) * _WEYL


def _tokens(keys: NDArray[np.uint64], *, length: int, vocab_size: int) -> Counts:
    ids = _mixed(keys[:, None] + _positions(length)) % np.uint64(vocab_size)
    return ids.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), elementwise."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
