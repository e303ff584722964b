"""Who does what where prompts and decodes have workers of their own, and who works for which request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["prefill", "decode", "router"]


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks: the ``prefill`` workers first, then the ``decode`` workers; the router, which has no device to work on,
    comes last."""

    rank: int
    prefill: int
    decode: int

    @property
    def role(self) -> Role:
        if self.rank < self.prefill:
            return "prefill"
        return "decode" if self.rank < self.router else "router"

    @property
    def name(self) -> str:
        first = self.prefill if self.role == "decode" else 0
        return "router" if self.rank == self.router else f"{self.role} {self.rank - first}"

    def name_of(self, rank: int) -> str:
        return replace(self, rank=rank).name

    @property
    def router(self) -> int:
        return self.prefill + self.decode

    def prefill_of(self, index: int) -> int:
        """The rank that computes the prompt of the workload's request number ``index``: all in turn."""
        return index % self.prefill

    def decode_of(self, index: int) -> int:
        """The rank that decodes it: all in turn, so that in the end every pair has met."""
        return self.prefill + index // self.prefill % self.decode
