"""Which requests a data-parallel rank has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankShare:
    """Rank ``rank`` of ``ranks``: requests go to them in turn (upstream's round robin)."""

    rank: int
    ranks: int

    def has(self, index: int) -> bool:
        """Whether the request at that place of the workload is this rank's."""
        return index % self.ranks == self.rank

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]
