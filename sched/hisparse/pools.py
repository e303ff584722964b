"""The pools of hot buffers: tables on the device, and pages of pinned host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ..config import HiSparseConfig
from ..kernels.hot_buffers import empty_buffer

LONGEST = 1 << 15  # most slots of a hot buffer: slot numbers have 16 bits


class HostPool:
    """KV of all layers in pinned memory, one row per token. Page 0 is padding and is never handed out.

    Invariant: the free pages and those of requests partition 1..size / page_size.
    """

    def __init__(self, storage: torch.Tensor, page_size: int) -> None:
        self.storage = storage  # [tokens + page_size, layers, 2, kv_heads, d]
        self.page_size = page_size
        self.free_pages = deque(range(1, self.pages + 1))

    @property
    def pages(self) -> int:
        return self.storage.shape[0] // self.page_size - 1

    def layer(self, index: int) -> torch.Tensor:
        """[host slots, 2, kv_heads, d]"""
        return self.storage[:, index]

    def alloc(self, num_tokens: int) -> list[int]:
        """Pages for ``num_tokens``, those that have been free the longest. There are always enough, because every token
        on the host has a logical slot and there are as many host slots as logical ones."""
        return [self.free_pages.popleft() for _ in range(-(-num_tokens // self.page_size))]

    def free(self, pages: Sequence[int]) -> None:
        self.free_pages.extend(pages)

    def slots(self, pages: Sequence[int]) -> torch.Tensor:
        """[pages · page_size] int64 on the host."""
        starts = np.array(pages, np.int64)[:, None] * self.page_size
        return torch.from_numpy((starts + np.arange(self.page_size)).reshape(-1))


class HotBuffers:
    """The locations of KV, for each row of req_to_token. R rows, L layers, B slots of a buffer, P tokens of a page."""

    def __init__(
        self,
        config: HiSparseConfig,
        *,
        rows: int,
        layers: int,
        slots: int,
        context_len: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.size = config.device_buffer_size
        self.page_size = page_size
        held, whole = self.size + page_size, context_len + page_size
        self.identity = torch.arange(self.size, dtype=torch.int32, device=device)
        # mapping [logical slots]: the device slot of a logical slot's KV; 0 for none
        self.mapping = torch.zeros(slots, dtype=torch.int64, device=device)
        # device_buffer [R, B + P]: the buffer's slots; slot B is the newest token's once the buffer is full
        self.device_buffer = torch.zeros((rows, held), dtype=torch.int64, device=device)
        # tokens [L, R, B]: the position in each slot; lru [L, R, B]: the slots, least recently used first
        self.tokens = self.identity.expand(layers, rows, self.size).clone()
        self.lru = self.identity.to(torch.int16).expand(layers, rows, self.size).clone()
        # host_slots [R, context + P]: the host slot of each position; staged_lens [R]: how many positions were staged
        self.host_slots = torch.zeros((rows, whole), dtype=torch.int64, device=device)
        self.staged_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        # lookups [2]: tokens looked up in the buffers of long requests, and tokens not found
        self.lookups = torch.zeros(2, dtype=torch.int64, device=device)

    def full_size(self, seq_len: int) -> int:
        """The slots of the buffer of a request with ``seq_len`` tokens: whole pages, at most B + P."""
        pages = -(-min(seq_len, self.size + 1) // self.page_size)
        return pages * self.page_size

    def empty(self, row: int) -> None:
        """Mark the slots of the row's buffer as containing no tokens."""
        empty_buffer(list(self.tokens), row)

    def reset(self, row: int) -> None:
        """Reset the row for the next request, whose first B tokens are in the buffer in order."""
        self.tokens[:, row] = self.identity
        self.lru[:, row] = self.identity
