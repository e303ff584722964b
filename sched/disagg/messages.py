"""Messages between the router and the workers. Requests are identified by their ids."""

from __future__ import annotations

from typing import NamedTuple

import torch

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
