"""The memory of requests: rows of the page table, KV and the indexer's keys, and the allocators that own KV slots, by
token and by page.

The list of free pages is on the device and the host reads only its length, so that allocating does not wait for the
device. A slot is ``page * page_size + offset``; page 0 is padding and is never handed out.
"""

from __future__ import annotations

from collections import deque

import torch

from ..kernels.allocation import alloc_decode_slots, alloc_extend_slots

Extents = tuple[torch.Tensor, torch.Tensor]
"""Starts and ends of the positions of each request, [b] each."""


class ReqToTokenPool:
    """One row per running request; row 0 is padding and is never handed out.

    Invariant: ``free_slots`` and the rows in use partition 1..size.
    """

    def __init__(self, size: int, max_context_len: int, *, device: torch.device) -> None:
        self.size = size
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

    @property
    def caches(self) -> list[torch.Tensor]:
        """Those of the keys, then those of the values."""
        return [*self.k_cache, *self.v_cache]


class IndexPool:
    """The keys are on the device even if KV is not, because every step scores all cached tokens."""

    def __init__(
        self, *, num_layers: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (slots, head_dim)
        self.k_cache = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]


class KVAllocator:
    """Hands out slots. Sizes are in tokens. Pages have one token, so that a page's number is its slot, unless the
    allocator is a ``PagedAllocator``.

    ``free_pages`` [n] int64 on the device is never written in place, so that its reference is a state. Between
    ``free_group_begin`` and ``free_group_end`` freed indices are only collected, as views: their tensors must not
    change before the group ends.
    """

    def __init__(self, size: int, page_size: int, device: torch.device) -> None:
        if size % page_size:
            raise ValueError(f"{size} tokens are no whole number of pages of {page_size}")
        self.size = size
        self.page_size = page_size
        self.device = device
        self.free_pages = torch.arange(1, size // page_size + 1, dtype=torch.int64, device=device)
        self._group: list[torch.Tensor] | None = None

    def available_size(self) -> int:
        return self.free_pages.shape[0] * self.page_size

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """[num_tokens] int64 slots (whole pages only), or None when there are fewer."""
        if num_tokens > self.available_size():
            return None
        return self._take(num_tokens)

    def claim(self, num_pages: int) -> torch.Tensor | None:
        """As ``alloc``, by pages, for a kernel that assigns their slots itself. Returns the previous free list, of
        which the first ``num_pages`` are taken."""
        pages = self.free_pages
        if num_pages > pages.shape[0]:
            return None
        if num_pages:
            self.free_pages = _without(pages, num_pages)
        return pages

    def free(self, indices: torch.Tensor) -> None:
        if indices.shape[0] == 0:
            return
        if self._group is None:
            self._release(indices)
        else:
            self._group.append(indices)

    def free_group_begin(self) -> None:
        assert self._group is None, "free groups do not nest"
        self._group = []

    def free_group_end(self) -> None:
        group, self._group = self._group, None
        if group:
            self._release(torch.cat(group))

    def _release(self, indices: torch.Tensor) -> None:
        self.free_pages = torch.cat((self.free_pages, indices))

    def _take(self, num_pages: int) -> torch.Tensor:
        taken = self.free_pages.narrow(0, 0, num_pages)
        self.free_pages = _without(self.free_pages, num_pages)
        return taken


def pages_between(starts: torch.Tensor, ends: torch.Tensor, page_size: int) -> int:
    """The number of new pages that requests need to grow from ``starts`` [b] to ``ends`` [b], on the host."""
    return int((-(-ends // page_size) - (-(-starts // page_size))).sum())


def _without(pages: torch.Tensor, count: int) -> torch.Tensor:
    """The pages behind the first ``count``."""
    return pages.narrow(0, count, pages.shape[0] - count)


class PagedAllocator(KVAllocator):
    """Pages of several tokens; a request's last page is filled before a new one is opened."""

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        if num_tokens % self.page_size:
            raise ValueError(f"{num_tokens} tokens are no whole number of pages of {self.page_size}")
        if num_tokens > self.available_size():
            return None
        pages = self._take(num_tokens // self.page_size)
        offsets = torch.arange(self.page_size, device=self.device)
        return (pages[:, None] * self.page_size + offsets).reshape(-1)

    def alloc_extend(
        self, last_loc: torch.Tensor, num_tokens: int, *, on_device: Extents, on_host: Extents
    ) -> torch.Tensor | None:
        """Slots [num_tokens] int64 of the positions [start, end) of each request, one request after the other; None
        when the pages run out. ``last_loc`` [b] is the slot of position start - 1, or -1."""
        starts, ends = on_host
        pages = pages_between(starts, ends, self.page_size)
        if pages > self.free_pages.shape[0]:
            return None
        slots: torch.Tensor = alloc_extend_slots(
            *on_device, last_loc, self.free_pages, self.page_size, num_tokens
        )
        self._take(pages)
        return slots

    def alloc_decode(
        self, *, seq_lens_cpu: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot per request for position seq_len - 1: the lengths already count the new token.

        ``last_loc`` [b] is the slot of position seq_len - 2. Returns [b] int64, or None when pages run out.
        """
        pages = int(((seq_lens_cpu - 1) % self.page_size == 0).sum())
        if pages > self.free_pages.shape[0]:
            return None
        slots: torch.Tensor = alloc_decode_slots(seq_lens, last_loc, self.free_pages, self.page_size)
        self._take(pages)
        return slots

    def _release(self, indices: torch.Tensor) -> None:
        pages = torch.unique(indices // self.page_size)
        self.free_pages = torch.cat((pages, self.free_pages))
