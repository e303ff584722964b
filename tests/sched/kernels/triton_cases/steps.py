"""Cases of a step's bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence

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
from tests.sched.kernels.triton_cases.case import INT32, Arguments, Case, floats, table

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
    for _page_size in (1, 4):
        CASES[f"place {len(_lens)} tokens in pages of {_page_size}"] = Case(
            place_decode,
            lambda n=_lens, p=_page_size: _place_decode(n, p),
            floats=False,
        )
        CASES[f"slots of {len(_lens)} tokens in pages of {_page_size}"] = Case(
            alloc_decode_slots,
            lambda n=_lens, p=_page_size: _decode_slots(n, p),
            floats=False,
        )
for _prefixes, _lens, _page_size in (((0,), (5,), 1), ((3, 0, 8, 5), (9, 2, 600, 6), 4), ((0, 2), (1, 3), 1)):
    CASES[f"slots of {_lens} behind {_prefixes} in pages of {_page_size}"] = Case(
        alloc_extend_slots,
        lambda m=_prefixes, n=_lens, p=_page_size: _extend_slots(m, n, p),
        floats=False,
    )
    CASES[f"rows of {_lens} behind {_prefixes}, {_page_size}"] = Case(
        _write_cache_indices, lambda m=_prefixes, n=_lens: _rows(m, n), floats=False
    )
    CASES[f"place prompts of {_lens} behind {_prefixes} in pages of {_page_size}"] = Case(
        place_extend,
        lambda m=_prefixes, n=_lens, p=_page_size: _place_extend(m, n, p),
        floats=False,
    )
CASES["decode inputs"] = Case(decode_inputs, lambda: _inputs((3, 1, 0), pages=False), floats=False)
CASES["inputs and pages"] = Case(
    decode_inputs, lambda: _inputs((3, 530), pages=True), floats=False, variant=True
)
CASES["copy pages"] = Case(
    copy_pages,
    lambda: [table(3, 9) * 0, table(3, 9), torch.tensor([2]), torch.tensor([7]), 9],
    floats=False,
)
CASES["decode positions"] = Case(decode_positions, lambda: [torch.tensor([4, 0, 300])], floats=False)
CASES["extend positions"] = Case(
    extend_positions,
    lambda: [torch.tensor([4, 300, 9]), torch.tensor([4, 270, 1], dtype=INT32), 275],
    floats=False,
)
CASES["last tokens"] = Case(last_tokens, lambda: [floats(8, 12), torch.tensor([3, 4, 1], dtype=INT32)])
CASES["stage a decode"] = Case(
    stage_decode,
    lambda: [torch.full((5, 9), 7), *(torch.arange(3) + place for place in range(5)), 6],
    floats=False,
)
CASES["stage rows"] = Case(stage_rows, lambda: [table(6, 5), torch.arange(15).view(3, 5), 4], floats=False)
CASES["resolve placeholders"] = Case(
    resolve_negative,
    lambda: [torch.tensor([5, -3, 0, -1]), torch.arange(20, 30)],
    floats=False,
)
