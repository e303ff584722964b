"""Cases of KV on its way to the host and back."""

from __future__ import annotations

from functools import partial

import torch

from schedbench.sched.kernels.hot_buffers import (
    back_up,
    map_newest,
    map_prompt,
    plan_swap_in,
    previous_tokens,
    swap_in,
    unmap,
)
from tests.sched.kernels.triton_cases.case import INT32, INT64, Arguments, Case, exact, floats

CASES: dict[str, Case] = {}


def _hot(size: int, rows: int, *, top_k: int) -> Arguments:
    """Buffers with scattered tokens and order: a long request, one that has all it needs, a short one, and padding."""
    dice = torch.Generator().manual_seed(6)
    tokens = torch.stack([torch.randperm(3 * size, generator=dice)[:size] for _ in range(rows)]).to(INT32)
    order = torch.stack([torch.randperm(size, generator=dice) for _ in range(rows)]).to(torch.int16)
    lens = torch.tensor([3 * size + 1, 3 * size, size - 1, 1])
    chosen = [
        torch.randperm(3 * size, generator=dice)[: top_k - 1],
        tokens[1, :top_k],
        torch.arange(top_k // 2),
    ]
    chosen = [torch.cat([chosen[0], lens[:1] - 1]), *chosen[1:], torch.zeros(1)]
    positions = torch.full((4, top_k), -1)
    for row, some in zip(positions, chosen, strict=True):
        row[: len(some)] = some.sort().values
    buffer = torch.arange(rows * (size + 4)).view(rows, -1).flip(0)
    where = [torch.tensor([3, 1, 2, 0]), lens, buffer]
    return [positions.to(INT32), *where, tokens, order, torch.tensor([5, 7]), 3 * size + 1]


def _fetched() -> Arguments:
    missing = torch.tensor([[4, -1, 9], [-1, -1, -1], [0, 7, -1]], dtype=INT32)
    targets = torch.where(missing >= 0, torch.arange(9).view(3, 3) + 1, 0).to(INT32)
    host = floats(40, 2, 2, 2, 6)
    host[0] = 0
    host_slots = torch.randperm(39, generator=torch.Generator().manual_seed(7))[:36].view(3, 12) + 1
    caches = [torch.zeros(20, 2, 6), torch.zeros(20, 2, 6)]
    return [*caches, host[:, 1], host_slots, torch.tensor([2, 0, 1]), missing, targets]


def _saved() -> Arguments:
    caches = [[floats(12, 2, 6, seed=layer) for layer in range(start, start + 3)] for start in (0, 3)]
    for cache in (*caches[0], *caches[1]):
        cache[0] = 0
    slots, host_slots = torch.tensor([7, -1, 3]), torch.tensor([2, 5, 8])
    return [*caches, torch.zeros(10, 3, 2, 2, 6), slots, host_slots]


for _size, _top_k in ((12, 8), (1100, 40)):
    CASES[f"plan of {_top_k} in buffers of {_size}"] = exact(
        plan_swap_in, partial(_hot, _size, 5, top_k=_top_k)
    )
CASES["swap in"] = Case(swap_in, _fetched, host=2)
CASES["back up"] = Case(back_up, _saved, host=2)


def _newest() -> Arguments:
    """Rows, lengths and a buffer for 12 tokens in pages of 4."""
    return [
        torch.tensor([2, 1, 3]),
        torch.tensor([5, 13, 30]),
        torch.randperm(64, generator=torch.Generator().manual_seed(9)).view(4, 16),
    ]


def _mapped(page_size: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mapping of whole pages, and logical slots that lead there."""
    pages = torch.randperm(400 // page_size, generator=torch.Generator().manual_seed(9))
    mapping = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    logical = pages.flip(0)[: -(-tokens // page_size), None] * page_size + torch.arange(page_size)
    return mapping, logical.flatten()[:tokens]


def _prompt(page_size: int) -> Arguments:
    _, slots = _mapped(page_size, 11)
    logical = torch.cat([slots, slots[:1] * 0 + 396])
    return [torch.zeros(400, dtype=INT64), logical, torch.arange(30).flip(0), page_size]


for _page in (1, 4):
    CASES[f"map a prompt in pages of {_page}"] = exact(map_prompt, partial(_prompt, _page))
    CASES[f"unmap pages of {_page}"] = exact(unmap, lambda p=_page: [*_mapped(p, 150), p])
CASES["map the newest"] = exact(
    map_newest,
    lambda: [torch.zeros(30, dtype=INT64), torch.tensor([4, 9, 7]), _newest()[2], *_newest()[:2], 12],
)
CASES["previous tokens"] = exact(
    previous_tokens,
    lambda: [_newest()[2], torch.arange(160).view(4, 40), torch.tensor([0, 12, 3, 2]), *_newest()[:2], 12],
)
