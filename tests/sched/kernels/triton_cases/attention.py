"""Cases of attention of every kind, and of the indexer's choice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from schedbench.sched.kernels.attention import attention, tree_attention
from schedbench.sched.kernels.sparse import (
    index_and_store,
    page_lookup,
    select_top_k,
    sparse_attention,
    sparse_extend,
)
from tests.sched.kernels.triton_cases.case import INT32, Arguments, Case, exact, floats, table

CASES: dict[str, Case] = {}


def _paged(lens: Sequence[int], kv_heads: int, d: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Caches, and the table, rows and lengths of requests whose slots are scattered."""
    count, context = len(lens), max(*lens, 1) + 3
    slots = torch.randperm(count * context, generator=torch.Generator().manual_seed(2)) + 1
    table = torch.cat([torch.zeros(2, context), slots.view(count, context)]).to(INT32)
    rows = torch.arange(count).flip(0) + 2
    caches = [floats(count * context + 1, kv_heads, d, seed=place) for place in range(2)]
    return caches, [table, rows, torch.tensor(lens)]


def _attention(
    lens: Sequence[int], new: Sequence[int] | None, heads: int, kv_heads: int, d: int
) -> Arguments:
    caches, where = _paged(lens, kv_heads, d)
    extend_lens = None if new is None else torch.tensor(new, dtype=INT32)
    tokens = len(lens) if new is None else sum(new)
    bounds = [max(lens), max(new, default=1) if new else 1]
    return [floats(tokens, heads, d), *caches, *where, extend_lens, d**-0.5, *bounds]


def _tree(lens: Sequence[int], depth: int) -> Arguments:
    """Two tokens of each request, one behind the other in its tree."""
    caches, (table, rows, seq_lens) = _paged(lens, 1, 8)
    each = [tensor.repeat_interleave(2) for tensor in (rows, seq_lens)]
    branch_lens = torch.tensor([1, 2] * len(lens))
    branches = torch.randint(1, 9, (2 * len(lens), depth), generator=torch.Generator().manual_seed(3))
    return [floats(2 * len(lens), 2, 8), *caches, table, *each, branches, branch_lens, 0.3, max(lens)]


def _sparse(lens: Sequence[int], k: int) -> Arguments:
    caches, (table, _, seq_lens) = _paged([*lens, k], 2, 8)
    locations = table[2 : 2 + len(lens), :k].contiguous()
    return [floats(len(lens), 4, 8), *caches, locations, seq_lens[: len(lens)], 0.3]


for _heads, _kv_heads, _d, _lens in ((4, 4, 8, (5,)), (4, 1, 16, (300, 1, 64)), (14, 2, 12, (7, 130))):
    CASES[f"decode of {_lens} by {_heads} heads on {_kv_heads}"] = Case(
        attention, partial(_attention, _lens, None, _heads, _kv_heads, _d)
    )
for _lens, _new in (((5,), (5,)), ((70, 40, 3), (3, 40, 1)), ((2, 150), (1, 67))):
    for _heads, _kv_heads in ((2, 2), (4, 1), (3, 1)):
        CASES[f"extend by {_new} to {_lens} by {_heads} heads on {_kv_heads}"] = Case(
            attention,
            partial(_attention, _lens, _new, _heads, _kv_heads, 8),
            variant=_new == (5,) and _heads == 2,
        )
CASES["tree attention"] = Case(tree_attention, partial(_tree, (4, 150, 2), 3))
CASES["sparse attention"] = Case(sparse_attention, partial(_sparse, (3, 40, 8), 8))


def _select(lens: Sequence[int], top_k: int, *, ties: bool) -> Arguments:
    (cache, _), where = _paged(lens, 1, 12)
    q = -torch.ones(len(lens), 3, 12) if ties else floats(len(lens), 3, 12)
    keys = torch.ones_like(cache[:, 0]) if ties else cache[:, 0].contiguous()
    return [q, floats(len(lens), 3), keys, *where, top_k, max(lens)]


def _sparse_extend(lens: Sequence[int], new: Sequence[int], *, mapped: bool) -> Arguments:
    caches, (table, rows, seq_lens) = _paged(lens, 1, 8)
    slots, tokens = caches[0].shape[0], sum(new)
    mapping = torch.randperm(slots, generator=torch.Generator().manual_seed(8)) if mapped else None
    where = [torch.arange(n - m, n) for n, m in zip(lens, new, strict=True)]
    index = [floats(tokens, 3, 12), floats(tokens, 3), floats(slots, 12)]
    rest = [table, mapping, rows, torch.cat(where), seq_lens, torch.tensor(new, dtype=INT32)]
    return [floats(tokens, 2, 8), *caches, *index, *rest, 0.3, 6, max(lens)]


for _lens, _ties in (((30,), False), ((1, 1200, 8, 9), False), ((40, 3), True)):
    _what = f"{_lens}{', all equal' * _ties}"
    CASES[f"best of {_what}"] = Case(select_top_k, partial(_select, _lens, 8, ties=_ties))
CASES |= {
    "sparse extend": Case(sparse_extend, partial(_sparse_extend, (9, 70), (4, 3), mapped=False)),
    "sparse extend elsewhere": Case(
        sparse_extend, partial(_sparse_extend, (9,), (9,), mapped=True), variant=True
    ),
    "index and store": Case(
        index_and_store, lambda: [floats(2, 4 * 12 + 3), torch.tensor([7, 4]), floats(9, 12), 3]
    ),
    "page lookup": exact(
        page_lookup,
        lambda: [torch.tensor([[3, 5, -1], [-1, -1, -1]], dtype=INT32), table(4, 9), torch.tensor([2, 1])],
    ),
}
