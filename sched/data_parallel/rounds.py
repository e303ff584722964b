"""What ranks tell one another before each step (upstream ``prepare_mlp_sync_batch``), host to host.

A round is everybody's words, the same on every rank: what follows from it alone, all do alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..link import Link
from .share import RankShare

ROUND = "round"


class End(NamedTuple):
    """A request that has ended, its place in the workload, and when, ns."""

    id: str
    place: int
    at: int


class Word(NamedTuple):
    """Of one rank. ``busy``: it looks again at once, also where nobody has tokens; ``next_at``: when its next request
    comes, as far as that is known, ns."""

    num_tokens: int = 0  # of the step that it has planned
    graph_rows: int | None = 0  # how many of a graph that step has; None where it cannot be one
    busy: bool = False
    next_at: int | None = None
    ended: tuple[End, ...] = ()  # since the last round


@dataclass(frozen=True, slots=True)
class Round:
    words: Sequence[Word]  # by rank

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Of each rank's step; all zeros: there is none."""
        return tuple(word.num_tokens for word in self.words)

    @property
    def graph_rows(self) -> int:
        """How large a graph all ranks replay together; 0 where one of them cannot."""
        rows = [word.graph_rows for word in self.words]
        return 0 if None in rows else max(count for count in rows if count is not None)

    @property
    def goes_on(self) -> bool:
        """Without waiting for anything, though there is no step."""
        return any(word.busy or word.ended for word in self.words)

    @property
    def next_at(self) -> int | None:
        """When the next request comes to anybody, ns."""
        return min((word.next_at for word in self.words if word.next_at is not None), default=None)

    @property
    def ended(self) -> Sequence[End]:
        """In order, the same on every rank."""
        ends = [end for word in self.words for end in word.ended]
        return sorted(ends, key=lambda end: (end.at, end.place))


def meet(link: Link, share: RankShare, word: Word) -> Round:
    """Tell all others, and hear from all. Raises LinkError."""
    for rank in share.others:
        link.send(rank, ROUND, word)
    words = [word if rank == share.rank else link.receive(rank, ROUND).value for rank in range(share.ranks)]
    return Round(words)
