"""Kernels of drafting: candidates from logits, the draft model's input ids, and slots of a request's next tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .allocation import alloc_extend_slots, runs, write_runs
from .declare import INT64, kernel, meta_tensor, nbytes, reads
from .registry import Access, Work


@kernel(
    meta=lambda logits, topk: (
        meta_tensor(logits.shape[0], topk, dtype=torch.float32),
        meta_tensor(logits.shape[0], topk),
    ),
    # One pass for the mass, one for the largest.
    cost=lambda logits, topk: Work(2 * nbytes(logits) + 12 * logits.shape[0] * topk),
    triton="candidates",
)
def draft_topk(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Probabilities [n, topk] float32 and ids [n, topk] int64 of the most likely tokens of logits [n, vocab]; of
    equals the lowest id first."""
    ranked, ids = logits.sort(dim=1, descending=True, stable=True)
    mass = torch.logsumexp(logits, dim=1, keepdim=True)
    return torch.exp(ranked[:, :topk] - mass).to(torch.float32), ids[:, :topk].contiguous()


@kernel(
    meta=lambda input_ids: meta_tensor(input_ids.shape[0]),
    cost=lambda input_ids, next_ids, extend_lens: Work(2 * nbytes(input_ids) + nbytes(next_ids, extend_lens)),
    integer=True,
    triton="drafts",
)
def rotate_ids(input_ids: Tensor, next_ids: Tensor, extend_lens: Tensor) -> Tensor:
    """Each request's tokens of input_ids [T] shifted by one to the front, and next_ids [b] after them: a draft model
    takes a token together with the hidden state of the previous one."""
    moved = torch.roll(input_ids, -1)
    moved[torch.cumsum(extend_lens.to(torch.int64), 0) - 1] = next_ids.to(moved.dtype)
    return moved


def _places_meta(seq_lens: Tensor, each: int) -> tuple[Tensor, Tensor]:
    total = seq_lens.shape[0] * each
    return meta_tensor(total), meta_tensor(total)


def _places_cost(table: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, each: int) -> Work:
    per_token = table.element_size() + 2 * INT64
    return Work(nbytes(req_pool_indices, seq_lens) + per_token * seq_lens.shape[0] * each)


def _places_footprint(
    table: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, each: int, width: int
) -> tuple[Access, ...]:
    rows, lens = req_pool_indices, seq_lens
    places = (rows * width + lens).unsqueeze(1) + torch.arange(each, device=rows.device)
    return (*reads(rows, lens), Access(table, write=False, rows=places.flatten()))


@kernel(meta=_places_meta, cost=_places_cost, footprint=_places_footprint, integer=True, triton="drafts")
def _draft_places(
    table: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, each: int, width: int
) -> tuple[Tensor, Tensor]:
    positions = seq_lens.unsqueeze(1) + torch.arange(each, device=seq_lens.device)
    slots = table[req_pool_indices.unsqueeze(1) * width + positions]
    return positions.flatten(), slots.to(torch.int64).flatten()


def draft_places(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Positions and slots, [b · count] int64 each, of the ``count`` positions from ``seq_lens`` [b] on, read from the
    rows of the page table in one launch."""
    width = req_to_token.shape[1]
    positions, slots = _draft_places(req_to_token.view(-1), req_pool_indices, seq_lens, count, width)
    return positions, slots


def _write_cost(table: Tensor, req_pool_indices: Tensor, starts: Tensor, lens: Tensor, slots: Tensor) -> Work:
    return Work(nbytes(req_pool_indices, starts, lens, slots) + table.element_size() * slots.shape[0])


def _write_footprint(
    table: Tensor, req_pool_indices: Tensor, starts: Tensor, lens: Tensor, slots: Tensor, width: int
) -> tuple[Access, ...]:
    places = runs(req_pool_indices * width + starts, lens, slots.shape[0])
    return (Access(table, write=True, rows=places), *reads(req_pool_indices, starts, lens, slots))


@kernel(mutates=("table",), cost=_write_cost, footprint=_write_footprint, integer=True, triton="drafts")
def _write_rows(
    table: Tensor, req_pool_indices: Tensor, starts: Tensor, lens: Tensor, slots: Tensor, width: int
) -> None:
    write_runs(table, req_pool_indices * width + starts, lens.to(torch.int64), slots)


def write_rows(
    req_to_token: Tensor, req_pool_indices: Tensor, starts: Tensor, lens: Tensor, slots: Tensor
) -> None:
    """Writes ``slots`` [sum of lens] to the rows in one launch, ``lens`` [b] of them from position ``starts`` [b]."""
    _write_rows(req_to_token.view(-1), req_pool_indices, starts, lens, slots, req_to_token.shape[1])


class PlacesAhead(NamedTuple):
    """The positions [start, end) of b requests, and the page table that their slots are written to."""

    table: Tensor  # [rows · width], flat
    req_pool_indices: Tensor  # [b]
    starts: Tensor  # [b]
    ends: Tensor  # [b]
    free_pages: Tensor
    page_size: int
    num_tokens: int  # the sum of ends - starts
    width: int


def _ahead_cost(
    table: Tensor, req_pool_indices: Tensor, starts: Tensor, ends: Tensor, num_tokens: int
) -> Work:
    return Work(nbytes(req_pool_indices, starts, ends) + (INT64 + table.element_size()) * num_tokens)


def _ahead_footprint(places: PlacesAhead) -> tuple[Access, ...]:
    table, req_pool_indices, starts, ends, free_pages, _, num_tokens, width = places
    rows = req_pool_indices * width
    return (
        Access(table, write=True, rows=runs(rows + starts, ends - starts, num_tokens)),
        Access(table, write=False, rows=rows + (starts - 1).clamp(min=0)),
        *reads(req_pool_indices, starts, ends, free_pages),
    )


@kernel(mutates=("table",), cost=_ahead_cost, footprint=_ahead_footprint, integer=True, triton="drafts")
def _place_ahead(places: PlacesAhead) -> None:
    table, req_pool_indices, starts, ends, free_pages, page_size, num_tokens, width = places
    rows = req_pool_indices * width
    last_loc = table[rows + (starts - 1).clamp(min=0)].to(torch.int64)
    slots = alloc_extend_slots(starts, ends, last_loc, free_pages, page_size, num_tokens)
    write_runs(table, rows + starts, ends - starts, slots)


def place_ahead(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    lens: tuple[Tensor, Tensor],
    free_pages: Tensor,
    page_size: int,
    num_tokens: int,
) -> None:
    """Allocates slots for the positions [start, end) of each request from the front of ``free_pages`` and writes them
    to its row, in one launch instead of one each for finding last slots, allocating and writing. ``lens`` are starts
    and ends, [b] each, ``num_tokens`` the sum of their differences."""
    table, width = req_to_token.view(-1), req_to_token.shape[1]
    _place_ahead(table, req_pool_indices, *lens, free_pages, page_size, num_tokens, width)


def _picked_meta(rows: Tensor, accept_lens: Tensor) -> Tensor:
    return meta_tensor(accept_lens.shape[0], *rows.shape[1:], dtype=rows.dtype)


def _picked_cost(rows: Tensor, accept_lens: Tensor) -> Work:
    taken = accept_lens.shape[0] * nbytes(rows) // max(rows.shape[0], 1)
    return Work(nbytes(accept_lens) + 2 * taken)


def _last_accepted(rows: Tensor, accept_lens: Tensor) -> Tensor:
    b = accept_lens.shape[0]
    each = torch.arange(b, device=rows.device) * (rows.shape[0] // max(b, 1))
    return rows.index_select(0, each + accept_lens.to(torch.int64).clamp(min=1) - 1)


@kernel(meta=_picked_meta, cost=_picked_cost, triton="drafts")
def pick_accepted(rows: Tensor, accept_lens: Tensor) -> Tensor:
    """For each request the last accepted of its d rows: of rows [b · d, n] floating-point, accept_lens [b] → [b, n]."""
    return _last_accepted(rows, accept_lens)


@kernel(meta=_picked_meta, cost=_picked_cost, integer=True, triton="drafts")
def pick_bonus(rows: Tensor, accept_lens: Tensor) -> Tensor:
    """``pick_accepted`` of tokens [b · d] int64: [b]."""
    return _last_accepted(rows, accept_lens)
