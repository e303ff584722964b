"""The bookkeeping of a whole step in one launch: slots of the new tokens, page table, lengths.

``allocation`` has the same work as upstream splits it, one small kernel for each part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .allocation import INT64, alloc_decode_slots, alloc_extend_slots, write_runs
from .declare import declared, nbytes, nothing, reads
from .registry import Access, Work, kernel


class _PlaceDecode(NamedTuple):
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    orig_seq_lens: torch.Tensor
    free_pages: torch.Tensor
    page_size: int

    def meta(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b = self.seq_lens.shape[0]
        slots, lens = nothing(b, dtype=torch.int64), nothing(b, dtype=torch.int64)
        return slots, lens, nothing(b, dtype=self.orig_seq_lens.dtype)

    def cost(self) -> Work:
        per_row = 2 * INT64 + 2 * self.req_to_token.element_size()
        lens = 2 * nbytes(self.seq_lens, self.orig_seq_lens)
        return Work(nbytes(self.req_pool_indices) + lens + per_row * self.seq_lens.shape[0])

    def footprint(self) -> tuple[Access, ...]:
        rows = Access(self.req_to_token, write=True, rows=self.req_pool_indices)
        return (rows, *reads(self.req_pool_indices, self.seq_lens, self.orig_seq_lens, self.free_pages))


@kernel(
    "place_decode(Tensor(a!) req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor orig_seq_lens, "
    "Tensor free_pages, int page_size) -> (Tensor, Tensor, Tensor)",
    meta=lambda *args: _PlaceDecode(*args).meta(),
    cost=lambda *args: _PlaceDecode(*args).cost(),
    footprint=lambda *args: _PlaceDecode(*args).footprint(),
    integer=True,
    triton="placement",
)
def place_decode(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    orig_seq_lens: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One more token for each request: its slot [b] int64, written to the row at position ``seq_lens``, and both
    lengths advanced, as new tensors. Pages are taken from the front of ``free_pages``."""
    longer = seq_lens + 1
    if page_size == 1:
        slots = free_pages[: seq_lens.shape[0]].clone()
    else:
        last_loc = req_to_token[req_pool_indices, seq_lens - 1]
        slots = alloc_decode_slots(longer, last_loc, free_pages, page_size)
    req_to_token[req_pool_indices, seq_lens] = slots.to(req_to_token.dtype)
    return slots, longer, orig_seq_lens + 1


class _PlaceExtend(NamedTuple):
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    free_pages: torch.Tensor
    page_size: int
    num_tokens: int

    def meta(self) -> torch.Tensor:
        return nothing(self.num_tokens, dtype=torch.int64)

    def cost(self) -> Work:
        pages = self.num_tokens // self.page_size + self.seq_lens.shape[0]
        written = self.req_to_token.element_size() * (self.prefix.shape[0] + self.num_tokens)
        lens = nbytes(self.req_pool_indices, self.prefix_lens, self.seq_lens)
        return Work(lens + nbytes(self.prefix) + INT64 * (pages + self.num_tokens) + written)

    def footprint(self) -> tuple[Access, ...]:
        rows = Access(self.req_to_token, write=True, rows=self.req_pool_indices)
        return (rows, *reads(*self[1:6]))


@declared(
    "place_extend(Tensor(a!) req_to_token, Tensor req_pool_indices, Tensor prefix, Tensor prefix_lens, "
    "Tensor seq_lens, Tensor free_pages, int page_size, int num_tokens) -> Tensor",
    _PlaceExtend,
    integer=True,
    triton="placement",
)
def place_extend(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix: torch.Tensor,
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    num_tokens: int,
) -> torch.Tensor:
    """Slots [num_tokens] int64 of positions [prefix_len, seq_len) of each request; its row gets prefix and slots.

    ``prefix`` [sum of prefix_lens] int64 are the slots of the cached prefixes, one request after the other.
    Pages are taken from the front of ``free_pages``.
    """
    ends = torch.cumsum(prefix_lens, 0)
    last_loc = torch.full_like(prefix_lens, -1)
    if prefix.shape[0]:
        last_loc = torch.where(prefix_lens > 0, prefix[(ends - 1).clamp_(min=0)], last_loc)
    slots: torch.Tensor = alloc_extend_slots(
        prefix_lens, seq_lens, last_loc, free_pages, page_size, num_tokens
    )
    table, first = req_to_token.view(-1), req_pool_indices * req_to_token.shape[1]
    write_runs(table, first, prefix_lens, prefix)
    write_runs(table, first + prefix_lens, seq_lens - prefix_lens, slots)
    return slots


def page_bytes(req_to_token: torch.Tensor, seq_lens: torch.Tensor) -> int:
    """Bytes that a copy of the rows' entries reads and writes."""
    return 2 * req_to_token.element_size() * int(seq_lens.numpy().sum())


def copy_rows(
    pages: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
) -> None:
    """What ``copy_pages`` does, for a kernel that does it among other things."""
    if pages.device.type != "cpu":  # lengths are not known to the host: what is too much is never read
        pages[req_pool_indices, :max_seq_len] = req_to_token[req_pool_indices, :max_seq_len]
        return
    target, source = pages.numpy(), req_to_token.numpy()
    for row, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        target[row, :length] = source[row, :length]


class _CopyPages(NamedTuple):
    pages: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        lens = nbytes(self.req_pool_indices, self.seq_lens)
        return Work(lens + page_bytes(self.req_to_token, self.seq_lens))

    def footprint(self) -> tuple[Access, ...]:
        rows = self.req_pool_indices
        return (
            *reads(rows, self.seq_lens),
            Access(self.req_to_token, write=False, rows=rows),
            Access(self.pages, write=True, rows=rows),
        )


@declared(
    "copy_pages(Tensor(a!) pages, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "int max_seq_len) -> ()",
    _CopyPages,
    integer=True,
    fixed_cost=False,
    triton="placement",
)
def copy_pages(
    pages: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
) -> None:
    """Copy the first ``seq_lens`` entries of each row of the page table to the same place in ``pages``."""
    copy_rows(pages, req_to_token, req_pool_indices, seq_lens, max_seq_len)
