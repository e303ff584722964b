"""The numbered strategies of an adversary: first fixed ones, which find what a random order may miss, then random ones.

With two streams, doing all work as late as possible and favouring either stream found every missing wait of a small
overlap loop deterministically; a missing write-after-read barrier showed in one random seed out of nine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from .order import OrderStrategy

FAVOURED = ("schedule", "forward", "copy", "staging", "backup", "lengths")
ALWAYS = 4  # strategies that apply to every run; the others favour streams that not every run has
STRATEGIES = ("all work as late as possible", *(f"the {name} stream first" for name in FAVOURED))
_CHANCE = 0.3  # of any stream going on after an item


class StreamFirst(OrderStrategy):
    """One stream goes on whenever it can. ``streams`` are the names that the scheduler gives to streams."""

    def __init__(self, name: str, streams: Mapping[int, str]) -> None:
        self._name = name
        self._streams = streams

    def choose(self, ready: Iterator[int]) -> int | None:
        return next((stream for stream in ready if self._streams.get(stream) == self._name), None)


class RandomOrder(OrderStrategy):
    """After an item, any stream goes on with a fixed probability."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, ready: Iterator[int]) -> int | None:
        if self._random.random() >= _CHANCE:
            return None
        streams = list(ready)
        return self._random.choice(streams) if streams else None


def strategy(seed: int, streams: Mapping[int, str]) -> OrderStrategy:
    """The strategy of that number: first those of ``STRATEGIES``, then random ones."""
    if seed == 0:
        return OrderStrategy()
    if seed < len(STRATEGIES):
        return StreamFirst(FAVOURED[seed - 1], streams)
    return RandomOrder(seed)


def described(seed: int) -> str:
    return STRATEGIES[seed] if seed < len(STRATEGIES) else f"random order {seed}"
