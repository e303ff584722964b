"""How an adversary is numbered: first strategies, each of which finds what random choice may miss, then random ones.

With two streams, doing all work as late as possible and favouring either stream found every missing edge of a small
overlap loop deterministically; a missing write-after-read barrier showed in one random seed out of nine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from .order import OrderStrategy

FAVOURED = ("schedule", "forward", "copy", "staging", "backup", "lengths")
ALWAYS = 4  # strategies that concern every run: the others favour streams that not every run has
STRATEGIES = ("all work as late as possible", *(f"the {name} stream first" for name in FAVOURED))
_CHANCE = 0.3  # that some stream goes on after each item


class Patient:
    """Nobody is in a hurry."""

    def choose(self, ready: Iterator[int]) -> int | None:  # noqa: ARG002
        return None


class Favouring:
    """One stream goes on whenever it can. ``streams`` are the names by which the scheduler calls them."""

    def __init__(self, name: str, streams: Mapping[int, str]) -> None:
        self._name = name
        self._streams = streams

    def choose(self, ready: Iterator[int]) -> int | None:
        return next((stream for stream in ready if self._streams.get(stream) == self._name), None)


class Random:
    """Now and then any stream goes on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, ready: Iterator[int]) -> int | None:
        if self._random.random() >= _CHANCE:
            return None
        streams = list(ready)
        return self._random.choice(streams) if streams else None


def temper(seed: int, streams: Mapping[int, str]) -> OrderStrategy:
    """Of that seed: the strategies in their order, then random ones."""
    if seed == 0:
        return Patient()
    if seed < len(STRATEGIES):
        return Favouring(FAVOURED[seed - 1], streams)
    return Random(seed)


def described(seed: int) -> str:
    return STRATEGIES[seed] if seed < len(STRATEGIES) else f"random order {seed}"
