"""Kernels of drafting: candidates from logits, the draft model's input ids, and slots of a request's next tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .allocation import alloc_extend_slots, runs, write_runs
from .declare import INT64, Access, Work, Written, kernel, meta_tensor, meta_tensors, nbytes, reads


@kernel(
    meta=lambda logits, topk: (
        meta_tensor(logits.shape[0], topk, dtype=torch.float32),
        meta_tensor(logits.shape[0], topk),
    ),
    # One pass for the mass, one for the largest.
    cost=lambda logits, topk: Work(2 * nbytes(logits) + 12 * logits.shape[0] * topk),
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
)
def rotate_ids(input_ids: Tensor, next_ids: Tensor, extend_lens: Tensor) -> Tensor:
    """Each request's tokens of input_ids [T] shifted by one to the front, and next_ids [b] after them: a draft model
    takes a token together with the hidden state of the previous one."""
    moved = torch.roll(input_ids, -1)
    moved[torch.cumsum(extend_lens.to(torch.int64), 0) - 1] = next_ids.to(moved.dtype)
    return moved


@kernel(
    meta=lambda seq_lens, each: meta_tensors(2, seq_lens.shape[0] * each),
    cost=lambda table, req_pool_indices, seq_lens, each: Work(
        nbytes(req_pool_indices, seq_lens) + (table.element_size() + 2 * INT64) * seq_lens.shape[0] * each
    ),
    footprint=lambda table, req_pool_indices, seq_lens, each, width: (
        *reads(req_pool_indices, seq_lens),
        Access(
            table,
            write=False,
            rows=(
                (req_pool_indices * width + seq_lens).unsqueeze(1) + torch.arange(each, device=table.device)
            ).flatten(),
        ),
    ),
)
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
    return _draft_places(req_to_token.view(-1), req_pool_indices, seq_lens, count, width)


@kernel(
    cost=lambda table, req_pool_indices, starts, lens, slots: Work(
        nbytes(req_pool_indices, starts, lens, slots) + table.element_size() * slots.shape[0]
    ),
    footprint=lambda table, req_pool_indices, starts, lens, slots, width: (
        Access(table, write=True, rows=runs(req_pool_indices * width + starts, lens, slots.shape[0])),
        *reads(req_pool_indices, starts, lens, slots),
    ),
)
def _write_rows(
    table: Written, req_pool_indices: Tensor, starts: Tensor, lens: Tensor, slots: Tensor, width: int
) -> None:
    write_runs(table, req_pool_indices * width + starts, lens.to(torch.int64), slots)


def write_rows(
    req_to_token: Tensor, req_pool_indices: Tensor, starts: Tensor, lens: Tensor, slots: Tensor
) -> None:
    """Writes ``slots`` [sum of lens] to the rows in one launch, ``lens`` [b] of them from position ``starts`` [b]."""
    _write_rows(req_to_token.view(-1), req_pool_indices, starts, lens, slots, req_to_token.shape[1])


class PlacesAhead(NamedTuple):
    """The positions [start, end) of b requests, and the page table that their slots are written to."""

    table: Written  # [rows · width], flat
    req_pool_indices: Tensor  # [b]
    starts: Tensor  # [b]
    ends: Tensor  # [b]
    free_pages: Tensor
    page_size: int
    num_tokens: int  # the sum of ends - starts
    width: int


def _ahead_footprint(places: PlacesAhead) -> tuple[Access, ...]:
    table, req_pool_indices, starts, ends, free_pages, _, num_tokens, width = places
    rows = req_pool_indices * width
    return (
        Access(table, write=True, rows=runs(rows + starts, ends - starts, num_tokens)),
        Access(table, write=False, rows=rows + (starts - 1).clamp(min=0)),
        *reads(req_pool_indices, starts, ends, free_pages),
    )


@kernel(
    cost=lambda table, req_pool_indices, starts, ends, num_tokens: Work(
        nbytes(req_pool_indices, starts, ends) + (INT64 + table.element_size()) * num_tokens
    ),
    footprint=_ahead_footprint,
)
def place_ahead(places: PlacesAhead) -> None:
    """Allocates slots for the positions of each request from the front of ``free_pages`` and writes them to its row, in
    one launch instead of one each for finding last slots, allocating and writing."""
    table, req_pool_indices, starts, ends, free_pages, page_size, num_tokens, width = places
    rows = req_pool_indices * width
    last_loc = table[rows + (starts - 1).clamp(min=0)].to(torch.int64)
    slots = alloc_extend_slots(starts, ends, last_loc, free_pages, page_size, num_tokens)
    write_runs(table, rows + starts, ends - starts, slots)


def _picked_meta(rows: Tensor, accept_lens: Tensor) -> Tensor:
    return meta_tensor(accept_lens.shape[0], *rows.shape[1:], dtype=rows.dtype)


def _picked_cost(rows: Tensor, accept_lens: Tensor) -> Work:
    taken = accept_lens.shape[0] * nbytes(rows) // max(rows.shape[0], 1)
    return Work(nbytes(accept_lens) + 2 * taken)


def _last_accepted(rows: Tensor, accept_lens: Tensor) -> Tensor:
    b = accept_lens.shape[0]
    each = torch.arange(b, device=rows.device) * (rows.shape[0] // max(b, 1))
    return rows.index_select(0, each + accept_lens.to(torch.int64).clamp(min=1) - 1)


@kernel(meta=_picked_meta, cost=_picked_cost)
def pick_accepted(rows: Tensor, accept_lens: Tensor) -> Tensor:
    """For each request the last accepted of its d rows: of rows [b · d, n] floating-point, accept_lens [b] → [b, n]."""
    return _last_accepted(rows, accept_lens)


@kernel(meta=_picked_meta, cost=_picked_cost)
def pick_bonus(rows: Tensor, accept_lens: Tensor) -> Tensor:
    """``pick_accepted`` of tokens [b · d] int64: [b]."""
    return _last_accepted(rows, accept_lens)
