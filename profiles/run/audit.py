"""With values none: a request's KV tags are checked once more, in full, when it ends."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch

from ...sched.memory.slots import ReqToTokenPool
from ...sched.model.tags import TagPool, audit
from ...sched.observe import Observer
from ...sched.request import Request


class TagAudit(Observer):
    """Listens for endings, while the request still owns its row. ``damage`` has the ids of requests whose stored
    tags do not add up, with what they add up to; it enters the digest."""

    def __init__(
        self, tags: TagPool, slots: ReqToTokenPool, peek: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.damage: dict[str, int] = {}
        self._rows = peek(slots.req_to_token)
        self._tags = copy(tags)
        for name in ("tags", "sums", "weights"):
            setattr(self._tags, name, peek(getattr(tags, name)))

    def ending(self, request: Request) -> None:
        length = request.seqlen - 1  # the last token's KV was never computed
        assert request.req_pool_idx is not None
        difference = audit(self._tags, self._rows[request.req_pool_idx], length)
        if difference:
            self.damage[request.id] = difference
