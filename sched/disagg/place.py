"""Who does what behind a router, and who works for which request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["replica", "prefill", "decode", "router"]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Ranks: ``replicas`` that each do all, or the ``prefill`` workers and then the ``decode`` workers; the router,
    which has no device to work on, comes last."""

    rank: int
    prefill: int = 0
    decode: int = 0
    replicas: int = 0

    @property
    def role(self) -> Role:
        if self.rank == self.router:
            return "router"
        if self.rank < self.replicas:
            return "replica"
        return "prefill" if self.rank < self.replicas + self.prefill else "decode"

    @property
    def name(self) -> str:
        first = self.prefill if self.role == "decode" else 0
        return "router" if self.rank == self.router else f"{self.role} {self.rank - first}"

    def name_of(self, rank: int) -> str:
        return replace(self, rank=rank).name

    @property
    def router(self) -> int:
        return self.replicas + self.prefill + self.decode

    @property
    def ends(self) -> bool:
        """Whether requests end for their clients with what this rank does."""
        return self.role in ("replica", "decode")

    def workers_of(self, index: int) -> Sequence[int]:
        """The ranks that work for the workload's request number ``index``."""
        if self.replicas:
            return (index % self.replicas,)
        return self.prefill_of(index), self.decode_of(index)

    def ends_at(self, index: int) -> int:
        """Of these, the one that it ends at for its client."""
        return self.workers_of(index)[-1]

    def prefill_of(self, index: int) -> int:
        """The rank that computes the prompt of the workload's request number ``index``: all in turn."""
        return index % self.prefill

    def decode_of(self, index: int) -> int:
        """The rank that decodes it: all in turn, so that in the end every pair has met."""
        return self.prefill + index // self.prefill % self.decode
