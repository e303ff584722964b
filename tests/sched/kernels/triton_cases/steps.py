"""Cases of a step's bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from schedbench.sched.kernels.allocation import (
    _write_cache_indices,
    alloc_decode_slots,
    alloc_extend_slots,
    copy_pages,
    decode_inputs,
    place_decode,
    place_extend,
)
from schedbench.sched.kernels.rows import (
    decode_positions,
    extend_positions,
    last_tokens,
    resolve_negative,
    stage_decode,
    stage_rows,
)
from tests.sched.kernels.triton_cases.case import INT32, Arguments, Case, exact, floats, table

CASES: dict[str, Case] = {}


def _place_decode(lens: Sequence[int], page_size: int) -> Arguments:
    rows, seq_lens = torch.arange(len(lens)).flip(0) + 1, torch.tensor(lens)
    free_pages = torch.arange(40, 40 + sum(length % page_size == 0 for length in lens)).flip(0)
    return [table(len(lens) + 1, 12), rows, seq_lens, seq_lens.to(INT32) - 1, free_pages, page_size]


def _place_extend(prefixes: Sequence[int], lens: Sequence[int], page_size: int) -> Arguments:
    rows, prefix_lens, seq_lens = torch.arange(len(lens)) + 1, torch.tensor(prefixes), torch.tensor(lens)
    opened = sum(-(-n // page_size) - -(-m // page_size) for m, n in zip(prefixes, lens, strict=True))
    prefix = torch.arange(sum(prefixes)) * 3 + 7
    new = sum(lens) - sum(prefixes)
    free_pages = torch.arange(60, 60 + opened).flip(0)
    return [table(len(lens) + 1, 700), rows, prefix, prefix_lens, seq_lens, free_pages, page_size, new]


def _extend_slots(prefixes: Sequence[int], lens: Sequence[int], page_size: int) -> Arguments:
    *_, prefix_lens, seq_lens, free_pages, page_size, new = _place_extend(prefixes, lens, page_size)
    return [prefix_lens, seq_lens, torch.arange(len(lens)) * 100 + 3, free_pages, page_size, new]


def _decode_slots(lens: Sequence[int], page_size: int) -> Arguments:
    free_pages = torch.arange(40, 40 + sum((length - 1) % page_size == 0 for length in lens)).flip(0)
    return [torch.tensor(lens), torch.arange(len(lens), dtype=INT32) * 9, free_pages, page_size]


def _rows(prefixes: Sequence[int], lens: Sequence[int]) -> Arguments:
    """The addresses are those of CUDA's tensors, and filled in where there are none (``case.addressed``)."""
    rows, prefix_lens, seq_lens = torch.arange(len(lens)).flip(0), torch.tensor(prefixes), torch.tensor(lens)
    cached = [torch.arange(n) * 3 + 7 * n for n in prefixes if n]
    new = seq_lens - prefix_lens
    slots = torch.arange(int(new.sum())) * 2 + 1
    return [table(len(lens), 700), rows, cached, torch.zeros_like(rows), prefix_lens, seq_lens, new, slots]


def _inputs(lens: Sequence[int], *, pages: bool) -> Arguments:
    rows, schedules = torch.arange(len(lens)).flip(0) + 1, table(len(lens) + 1, 600)
    own = torch.zeros_like(schedules) if pages else None
    return [torch.arange(900, 920), rows, torch.tensor(lens), schedules, own, 600]


for _lens in ((7,), (1, 8, 3, 4)):
    for _page in (1, 4):
        _what = f"{len(_lens)} tokens in pages of {_page}"
        CASES[f"place {_what}"] = exact(place_decode, partial(_place_decode, _lens, _page))
        CASES[f"slots of {_what}"] = exact(alloc_decode_slots, partial(_decode_slots, _lens, _page))
for _prefixes, _lens, _page in (((0,), (5,), 1), ((3, 0, 8, 5), (9, 2, 600, 6), 4), ((0, 2), (1, 3), 1)):
    _what = f"{_lens} behind {_prefixes}"
    _pages = f"{_what} in pages of {_page}"
    CASES[f"slots of {_pages}"] = exact(alloc_extend_slots, partial(_extend_slots, _prefixes, _lens, _page))
    CASES[f"rows of {_what}, {_page}"] = exact(_write_cache_indices, partial(_rows, _prefixes, _lens))
    CASES[f"place prompts of {_pages}"] = exact(place_extend, partial(_place_extend, _prefixes, _lens, _page))
CASES |= {
    "decode inputs": exact(decode_inputs, partial(_inputs, (3, 1, 0), pages=False)),
    "inputs and pages": exact(decode_inputs, partial(_inputs, (3, 530), pages=True), variant=True),
    "copy pages": exact(
        copy_pages, lambda: [table(3, 9) * 0, table(3, 9), torch.tensor([2]), torch.tensor([7]), 9]
    ),
    "decode positions": exact(decode_positions, lambda: [torch.tensor([4, 0, 300])]),
    "extend positions": exact(
        extend_positions,
        lambda: [torch.tensor([4, 300, 9]), torch.tensor([4, 270, 1], dtype=INT32), 275],
    ),
    "last tokens": Case(last_tokens, lambda: [floats(8, 12), torch.tensor([3, 4, 1], dtype=INT32)]),
    "stage a decode": exact(
        stage_decode,
        lambda: [torch.full((5, 9), 7), *(torch.arange(3) + place for place in range(5)), 6],
    ),
    "stage rows": exact(stage_rows, lambda: [table(6, 5), torch.arange(15).view(3, 5), 4]),
    "resolve placeholders": exact(
        resolve_negative, lambda: [torch.tensor([5, -3, 0, -1]), torch.arange(20, 30)]
    ),
}
