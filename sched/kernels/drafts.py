"""Kernels of drafting: candidates from logits, the draft's input ids, and where a request's next tokens go."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .allocation import INT64, alloc_extend_slots, runs, write_runs
from .declare import declared, nbytes, nothing, reads
from .registry import Access, Work, kernel


class _DraftTopk(NamedTuple):
    logits: torch.Tensor
    topk: int

    def meta(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.logits.shape[0], self.topk)
        return nothing(*shape, dtype=torch.float32), nothing(*shape, dtype=torch.int64)

    def cost(self) -> Work:
        """One pass for the mass, one for the largest."""
        return Work(2 * nbytes(self.logits) + 12 * self.logits.shape[0] * self.topk)

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.logits)


@kernel(
    "draft_topk(Tensor logits, int topk) -> (Tensor, Tensor)",
    meta=lambda *args: _DraftTopk(*args).meta(),
    cost=lambda *args: _DraftTopk(*args).cost(),
    footprint=lambda *args: _DraftTopk(*args).footprint(),
    triton="candidates",
)
def draft_topk(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [n, topk] float32 and ids [n, topk] int64 of the most likely tokens of logits [n, vocab]; of
    equals the lowest id first."""
    ranked, ids = logits.sort(dim=1, descending=True, stable=True)
    mass = torch.logsumexp(logits, dim=1, keepdim=True)
    return torch.exp(ranked[:, :topk] - mass).to(torch.float32), ids[:, :topk].contiguous()


class _RotateIds(NamedTuple):
    input_ids: torch.Tensor
    next_ids: torch.Tensor
    extend_lens: torch.Tensor

    def meta(self) -> torch.Tensor:
        return nothing(self.input_ids.shape[0], dtype=torch.int64)

    def cost(self) -> Work:
        return Work(2 * nbytes(self.input_ids) + nbytes(self.next_ids, self.extend_lens))

    def footprint(self) -> tuple[Access, ...]:
        return reads(*self)


@declared(
    "rotate_ids(Tensor input_ids, Tensor next_ids, Tensor extend_lens) -> Tensor",
    _RotateIds,
    integer=True,
    triton="drafts",
)
def rotate_ids(input_ids: torch.Tensor, next_ids: torch.Tensor, extend_lens: torch.Tensor) -> torch.Tensor:
    """Each request's tokens of input_ids [T] moved one place to the front, and next_ids [b] behind them: a draft
    sees a token together with the hidden state of the one before."""
    moved = torch.roll(input_ids, -1)
    moved[torch.cumsum(extend_lens.to(torch.int64), 0) - 1] = next_ids.to(moved.dtype)
    return moved


class _DraftPlaces(NamedTuple):
    table: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    each: int
    width: int

    def meta(self) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.seq_lens.shape[0] * self.each
        return nothing(total, dtype=torch.int64), nothing(total, dtype=torch.int64)

    def cost(self) -> Work:
        per_token = self.table.element_size() + 2 * INT64
        return Work(nbytes(self.req_pool_indices, self.seq_lens) + per_token * len(self.seq_lens) * self.each)

    def footprint(self) -> tuple[Access, ...]:
        rows, lens = self.req_pool_indices, self.seq_lens
        places = (rows * self.width + lens).unsqueeze(1) + torch.arange(self.each, device=rows.device)
        return (*reads(rows, lens), Access(self.table, write=False, rows=places.flatten()))


@kernel(
    "draft_places(Tensor table, Tensor req_pool_indices, Tensor seq_lens, int each, int width)"
    " -> (Tensor, Tensor)",
    meta=lambda *args: _DraftPlaces(*args).meta(),
    cost=lambda *args: _DraftPlaces(*args).cost(),
    footprint=lambda *args: _DraftPlaces(*args).footprint(),
    integer=True,
    triton="drafts",
)
def _draft_places(
    table: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, each: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = seq_lens.unsqueeze(1) + torch.arange(each, device=seq_lens.device)
    slots = table[req_pool_indices.unsqueeze(1) * width + positions]
    return positions.flatten(), slots.to(torch.int64).flatten()


def draft_places(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and slots, [b · count] int64 each, of the ``count`` positions from ``seq_lens`` [b] on, as the rows
    of the page table have them. One launch."""
    width = req_to_token.shape[1]
    positions, slots = _draft_places(req_to_token.view(-1), req_pool_indices, seq_lens, count, width)
    return positions, slots


class _WriteRows(NamedTuple):
    table: torch.Tensor
    req_pool_indices: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    slots: torch.Tensor
    width: int

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        return Work(nbytes(*self[1:5]) + self.table.element_size() * self.slots.shape[0])

    def footprint(self) -> tuple[Access, ...]:
        places = runs(self.req_pool_indices * self.width + self.starts, self.lens, self.slots.shape[0])
        return (Access(self.table, write=True, rows=places), *reads(*self[1:5]))


@declared(
    "write_rows(Tensor(a!) table, Tensor req_pool_indices, Tensor starts, Tensor lens, Tensor slots, "
    "int width) -> ()",
    _WriteRows,
    integer=True,
    triton="drafts",
)
def _write_rows(
    table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    write_runs(table, req_pool_indices * width + starts, lens.to(torch.int64), slots)


def write_rows(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write ``slots`` [sum of lens] to the rows: ``lens`` [b] of them from position ``starts`` [b] on. One launch."""
    _write_rows(req_to_token.view(-1), req_pool_indices, starts, lens, slots, req_to_token.shape[1])


class _PlaceAhead(NamedTuple):
    table: torch.Tensor
    req_pool_indices: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    free_pages: torch.Tensor
    page_size: int
    num_tokens: int
    width: int

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        lens = nbytes(self.req_pool_indices, self.starts, self.ends)
        return Work(lens + (INT64 + self.table.element_size()) * self.num_tokens)

    def footprint(self) -> tuple[Access, ...]:
        rows = self.req_pool_indices * self.width
        written = runs(rows + self.starts, self.ends - self.starts, self.num_tokens)
        return (
            Access(self.table, write=True, rows=written),
            Access(self.table, write=False, rows=rows + (self.starts - 1).clamp(min=0)),
            *reads(self.req_pool_indices, self.starts, self.ends, self.free_pages),
        )


@declared(
    "place_ahead(Tensor(a!) table, Tensor req_pool_indices, Tensor starts, Tensor ends, "
    "Tensor free_pages, int page_size, int num_tokens, int width) -> ()",
    _PlaceAhead,
    integer=True,
    triton="drafts",
)
def _place_ahead(
    table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    num_tokens: int,
    width: int,
) -> None:
    rows = req_pool_indices * width
    last_loc = table[rows + (starts - 1).clamp(min=0)].to(torch.int64)
    slots = alloc_extend_slots(starts, ends, last_loc, free_pages, page_size, num_tokens)
    write_runs(table, rows + starts, ends - starts, slots)


def place_ahead(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: tuple[torch.Tensor, torch.Tensor],
    free_pages: torch.Tensor,
    page_size: int,
    num_tokens: int,
) -> None:
    """Slots for the positions [start, end) of each request, from the front of ``free_pages``, into its row: what
    allocating, looking for last slots and writing do in one launch each. ``lens`` are starts and ends, [b] each,
    ``num_tokens`` the sum of what lies between."""
    starts, ends = lens
    width = req_to_token.shape[1]
    _place_ahead(
        req_to_token.view(-1), req_pool_indices, starts, ends, free_pages, page_size, num_tokens, width
    )


class _PickAccepted(NamedTuple):
    rows: torch.Tensor
    accept_lens: torch.Tensor

    def meta(self) -> torch.Tensor:
        return nothing(self.accept_lens.shape[0], *self.rows.shape[1:], dtype=self.rows.dtype)

    def cost(self) -> Work:
        taken = self.accept_lens.shape[0] * nbytes(self.rows) // max(self.rows.shape[0], 1)
        return Work(nbytes(self.accept_lens) + 2 * taken)

    def footprint(self) -> tuple[Access, ...]:
        return reads(*self)


def _last_accepted(rows: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    b = accept_lens.shape[0]
    each = torch.arange(b, device=rows.device) * (rows.shape[0] // max(b, 1))
    return rows.index_select(0, each + accept_lens.to(torch.int64).clamp(min=1) - 1)


@declared("pick_accepted(Tensor rows, Tensor accept_lens) -> Tensor", _PickAccepted, triton="drafts")
def pick_accepted(rows: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    """Of rows [b · d, n] floating-point, d for each request, the last of those that accept_lens [b] counts: [b, n]."""
    return _last_accepted(rows, accept_lens)


@declared(
    "pick_bonus(Tensor rows, Tensor accept_lens) -> Tensor", _PickAccepted, integer=True, triton="drafts"
)
def pick_bonus(rows: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    """``pick_accepted`` of tokens [b · d] int64: [b]."""
    return _last_accepted(rows, accept_lens)


class _StageRows(NamedTuple):
    static: torch.Tensor
    source: torch.Tensor
    padded: int

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        return Work(2 * nbytes(self.source))

    def footprint(self) -> tuple[Access, ...]:
        return (*reads(self.source), Access(self.static, write=True))


@declared(
    "stage_rows(Tensor(a!) static, Tensor source, int padded) -> ()", _StageRows, integer=True, triton="rows"
)
def stage_rows(static: torch.Tensor, source: torch.Tensor, padded: int) -> None:
    """Copy integer rows [n, ...] to the head of ``static``; rows n to ``padded`` become zeros."""
    static[: source.shape[0]] = source
    static[source.shape[0] : padded] = 0
