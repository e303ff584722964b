"""The tensors of the memory of requests: rows of the page table, KV, and the indexer's keys.

Allocators manage the ownership of KV slots.
"""

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


class KVPool:
    """Keys and values of every layer, one row per slot. Page 0 is padding: it is written, never owned."""

    def __init__(
        self,
        *,
        num_layers: int,
        tokens: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self.page_size = page_size
        shape = (tokens + page_size, num_kv_heads, head_dim)

        # Zeros, because a masked position of the padding page is multiplied by 0 and must not be a NaN.
        def layers() -> list[torch.Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

        self.k_cache = layers()  # per layer [slots, kv_heads, head_dim]
        self.v_cache = layers()

    @property
    def slots(self) -> int:
        return self.tokens + self.page_size


class IndexPool:
    """The keys are on the device even if KV is not, because every step scores all cached tokens."""

    def __init__(
        self, *, num_layers: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (slots, head_dim)
        self.k_cache = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
