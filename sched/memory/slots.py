"""Rows of req_to_token: the KV slots of a request's tokens, by position."""

from __future__ import annotations

from collections import deque

import torch


class ReqToTokenPool:
    """One row per running request; row 0 is padding and is never handed out.

    Invariant: ``free_slots`` and the rows in use partition 1..size.
    """

    def __init__(self, size: int, max_context_len: int, *, device: torch.device) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.device = device
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32, device=device)
        self.free_slots = deque(range(1, size + 1))

    def available_size(self) -> int:
        """Rows that can still be handed out."""
        return len(self.free_slots)

    def alloc(self, n: int) -> list[int] | None:
        """The ``n`` rows that have been free the longest, or None when there are fewer."""
        if n > len(self.free_slots):
            return None
        return [self.free_slots.popleft() for _ in range(n)]

    def free(self, idx: int) -> None:
        self.free_slots.append(idx)
