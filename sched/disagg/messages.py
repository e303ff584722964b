"""What router and workers tell each other. A request is known by its id."""

from __future__ import annotations

from typing import NamedTuple

import torch

REQUEST = "request"  # router to both workers: a Request; None when there will be no more
ENDED = "ended"  # decode worker to router: an id
HANDSHAKE = "handshake"  # decode to prefill worker: Preallocated or Dropped
KV = "kv"  # prefill to decode worker: Chunk, with tensors, or Failed


class Preallocated(NamedTuple):
    """The decode worker has room: its pages, in the order of the prompt."""

    id: str
    pages: tuple[int, ...]


class Dropped(NamedTuple):
    """The decode worker wants no more of it. ``preallocated``: it had room, and waits for a last word before it gives
    that to others."""

    id: str
    preallocated: bool


class Metadata(NamedTuple):
    """What the prompt gave besides KV. Instants are ns of the common clock."""

    token: int
    logprobs: tuple[float, ...]  # of that token, if it was asked for
    cached_tokens: int
    first_scheduled_at: int | None
    prefilled_at: int | None
    draft: tuple[
        torch.Tensor, ...
    ] = ()  # topk_p, topk_index [topk] and hidden state [hidden], of the host's memory


class Chunk(NamedTuple):
    """KV of the positions [start, stop), for these pages of the decode worker; the last chunk of a prompt has the
    metadata."""

    id: str
    start: int
    stop: int
    pages: tuple[int, ...]
    metadata: Metadata | None


class Failed(NamedTuple):
    """There will be no (more) KV."""

    id: str
    reason: str = "its prompt was given up by its prefill worker"
