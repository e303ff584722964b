"""Which rows a batch is made of: token embeddings, positions, and each request's last token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .registry import Access, Work


class _Embedding(NamedTuple):
    input_ids: torch.Tensor
    table: torch.Tensor

    def meta(self) -> torch.Tensor:
        return nothing(self.input_ids.shape[0], self.table.shape[1], dtype=self.table.dtype)

    def cost(self) -> Work:
        row = self.table.shape[1] * self.table.element_size()
        return Work(nbytes(self.input_ids) + 2 * self.input_ids.shape[0] * row)

    def footprint(self) -> tuple[Access, ...]:
        return (*reads(self.input_ids), Access(self.table, write=False, rows=self.input_ids))


@declared("embedding(Tensor input_ids, Tensor table) -> Tensor", _Embedding)
def embedding(input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """input_ids [T] int64, table [vocab, n] → [T, n]."""
    return table.index_select(0, input_ids)


class _DecodePositions(NamedTuple):
    seq_lens: torch.Tensor

    def meta(self) -> torch.Tensor:
        return nothing(self.seq_lens.shape[0], dtype=torch.int64)

    def cost(self) -> Work:
        return Work(nbytes(self.seq_lens) + 8 * self.seq_lens.shape[0])

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.seq_lens)


@declared("decode_positions(Tensor seq_lens) -> Tensor", _DecodePositions, integer=True, triton="rows")
def decode_positions(seq_lens: torch.Tensor) -> torch.Tensor:
    """Position of each request's newest token: seq_lens [b] → [b] int64, never negative."""
    return (seq_lens.to(torch.int64) - 1).clamp_(min=0)


class _ExtendPositions(NamedTuple):
    seq_lens: torch.Tensor
    extend_lens: torch.Tensor
    num_tokens: int

    def meta(self) -> torch.Tensor:
        return nothing(self.num_tokens, dtype=torch.int64)

    def cost(self) -> Work:
        return Work(nbytes(self.seq_lens, self.extend_lens) + 8 * self.num_tokens)

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.seq_lens, self.extend_lens)


@declared(
    "extend_positions(Tensor seq_lens, Tensor extend_lens, int num_tokens) -> Tensor",
    _ExtendPositions,
    integer=True,
    triton="rows",
)
def extend_positions(seq_lens: torch.Tensor, extend_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Positions of the last ``extend_lens`` [b] tokens of each request, one request after the other.

    ``num_tokens`` is the sum of ``extend_lens``, as the host knows it → [num_tokens] int64.
    """
    shifts = seq_lens.to(torch.int64) - torch.cumsum(extend_lens, 0)
    index = torch.arange(num_tokens, device=seq_lens.device)
    return shifts.repeat_interleave(extend_lens, output_size=num_tokens) + index


class _LastTokens(NamedTuple):
    hidden: torch.Tensor
    extend_lens: torch.Tensor

    def meta(self) -> torch.Tensor:
        return nothing(self.extend_lens.shape[0], self.hidden.shape[1], dtype=self.hidden.dtype)

    def cost(self) -> Work:
        row = self.hidden.shape[1] * self.hidden.element_size()
        return Work(nbytes(self.extend_lens) + 2 * self.extend_lens.shape[0] * row)

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.hidden, self.extend_lens)


@declared("last_tokens(Tensor hidden, Tensor extend_lens) -> Tensor", _LastTokens, triton="rows")
def last_tokens(hidden: torch.Tensor, extend_lens: torch.Tensor) -> torch.Tensor:
    """hidden [T, n], extend_lens [b] → [b, n]: the row of each request's last token."""
    return hidden.index_select(0, torch.cumsum(extend_lens, 0) - 1)
