"""Kernels between one step's tokens and the next step's input."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .placement import copy_rows, page_bytes
from .registry import Access, Work, kernel

INT64 = 8  # bytes


class _ResolveNegative(NamedTuple):
    input_ids: torch.Tensor
    tokens: torch.Tensor

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        return Work(2 * nbytes(self.input_ids))

    def footprint(self) -> tuple[Access, ...]:
        ids = self.input_ids
        return Access(ids, write=True), Access(self.tokens, write=False, rows=-ids[ids < 0])


@declared(
    "resolve_negative(Tensor(a!) input_ids, Tensor tokens) -> ()",
    _ResolveNegative,
    integer=True,
    triton="rows",
)
def resolve_negative(input_ids: torch.Tensor, tokens: torch.Tensor) -> None:
    """Replace every v < 0 of input_ids [T] int64 by ``tokens[-v]``, in place; looks at all T of them."""
    input_ids.copy_(torch.where(input_ids < 0, tokens[(-input_ids).clamp_(min=0)], input_ids))


class _AssertAll(NamedTuple):
    condition: torch.Tensor

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        return Work(nbytes(self.condition))

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.condition)


@declared("assert_all(Tensor condition) -> ()", _AssertAll, integer=True)
def assert_all(condition: torch.Tensor) -> None:
    """Fail on the device unless ``condition`` [] bool holds. The host does not wait for it."""
    torch._assert_async(condition)


class _DecodeInputs(NamedTuple):
    tokens: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    req_to_token: torch.Tensor
    pages: torch.Tensor | None
    max_seq_len: int

    def meta(self) -> tuple[torch.Tensor, torch.Tensor]:
        b = self.seq_lens.shape[0]
        return nothing(b, dtype=torch.int64), nothing(b, dtype=torch.int64)

    def cost(self) -> Work:
        copied = 0 if self.pages is None else page_bytes(self.req_to_token, self.seq_lens)
        lens = nbytes(self.req_pool_indices, self.seq_lens)
        return Work(lens + 3 * INT64 * self.seq_lens.shape[0] + copied)

    def footprint(self) -> tuple[Access, ...]:
        rows = self.req_pool_indices
        gathered = (*reads(rows, self.seq_lens), Access(self.tokens, write=False, rows=rows))
        if self.pages is None:
            return gathered
        table = Access(self.req_to_token, write=False, rows=rows)
        return (*gathered, table, Access(self.pages, write=True, rows=rows))


@kernel(
    "decode_inputs(Tensor tokens, Tensor req_pool_indices, Tensor seq_lens, Tensor req_to_token, "
    "Tensor(a!)? pages, int max_seq_len) -> (Tensor, Tensor)",
    meta=lambda *args: _DecodeInputs(*args).meta(),
    cost=lambda *args: _DecodeInputs(*args).cost(),
    footprint=lambda *args: _DecodeInputs(*args).footprint(),
    integer=True,
    fixed_cost=False,
    triton="placement",
)
def decode_inputs(
    tokens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    pages: torch.Tensor | None,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All that a decode reads and the schedule may change, in one launch: input_ids ``tokens[req_pool_indices]`` and
    positions ``seq_lens - 1``, [b] int64 each, and, with ``pages``, the rows of the page table (``copy_pages``)."""
    if pages is not None:
        copy_rows(pages, req_to_token, req_pool_indices, seq_lens, max_seq_len)
    return tokens[req_pool_indices], (seq_lens - 1).clamp_(min=0)
