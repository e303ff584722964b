"""The roles of the ranks behind a router, the assignment of requests to workers, and the messages between router and
workers, in which requests are identified by their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

Role = Literal["replica", "prefill", "decode", "router"]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The ranks are ``replicas`` complete engines, or the ``prefill`` workers followed by the ``decode`` workers. The
    router, which has no device, is the last rank."""

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

    def gone_reason(self, rank: int, gone: Mapping[int, str]) -> str:
        """Why nothing comes from ``rank`` any more; ``gone`` holds the cause of each rank's loss."""
        return f"{self.name_of(rank)} is gone: {gone[rank]}"

    @property
    def router(self) -> int:
        return self.replicas + self.prefill + self.decode

    @property
    def ends(self) -> bool:
        """Whether a request ends for its client when it ends on this rank."""
        return self.role in ("replica", "decode")

    def workers_of(self, index: int) -> Sequence[int]:
        """The ranks that work on request number ``index`` of the workload."""
        if self.replicas:
            return (index % self.replicas,)
        return self.prefill_of(index), self.decode_of(index)

    def ends_at(self, index: int) -> int:
        """The rank on which request number ``index`` ends for its client."""
        return self.workers_of(index)[-1]

    def prefill_of(self, index: int) -> int:
        """The rank that computes the prompt of request number ``index``, in turn."""
        return index % self.prefill

    def decode_of(self, index: int) -> int:
        """The rank that decodes request number ``index``, in turn such that all pairs of workers occur."""
        return self.prefill + index // self.prefill % self.decode


REQUEST = "request"  # router to both workers: a Request; None after the last one
ENDED = "ended"  # decode worker to router: an id
HANDSHAKE = "handshake"  # decode to prefill worker: Preallocated or Dropped
KV = "kv"  # prefill to decode worker: Chunk, with tensors, or Failed


class Preallocated(NamedTuple):
    """The decode worker has allocated ``pages`` for the prompt, in its order."""

    id: str
    pages: tuple[int, ...]


class Dropped(NamedTuple):
    """The decode worker no longer needs the request. If it was ``preallocated``, the decode worker waits for Failed
    before it reuses the pages."""

    id: str
    preallocated: bool


class Metadata(NamedTuple):
    """What a computed prompt yields besides KV. Instants are ns of the common clock."""

    token: int
    logprobs: tuple[float, ...]  # of that token, if the request asked for it
    cached_tokens: int
    first_scheduled_at: int | None
    prefilled_at: int | None
    draft: tuple[torch.Tensor, ...] = ()  # topk_p, topk_index [topk] and hidden state [hidden], on the host


class Chunk(NamedTuple):
    """KV of the positions [start, stop), for these pages of the decode worker. The last chunk of a prompt carries the
    metadata."""

    id: str
    start: int
    stop: int
    pages: tuple[int, ...]
    metadata: Metadata | None


class Failed(NamedTuple):
    """No more KV of the request follows."""

    id: str
    reason: str = "its prompt was given up by its prefill worker"
