"""Which requests belong to a data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankShare:
    """Rank ``rank`` of ``ranks``. Requests are assigned in turn (upstream's round robin)."""

    rank: int
    ranks: int

    def owns(self, index: int) -> bool:
        """Whether request number ``index`` of the workload belongs to this rank."""
        return index % self.ranks == self.rank

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]
