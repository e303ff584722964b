"""Cases of drafts, trees of drafts, and acceptance."""

from __future__ import annotations

from functools import partial

import torch

from schedbench.sched.kernels import drafts
from schedbench.sched.kernels.verify import accept_drafts, build_tree, tree_paths
from tests.sched.kernels.triton_cases.case import INT32, Arguments, Case, exact, floats, table

CASES: dict[str, Case] = {}

# A root with two children, of which the first has two, and a node at depth 3; then a chain.
PARENTS = torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 3, 4]])


def _candidates() -> Arguments:
    """Two candidates at the first depth and two below each; scores fall with depth, and some are equal."""
    scores = torch.tensor([[0.5, 0.4, 0.3, 0.1, 0.4, 0.1], [0.9, 0.2, 0.8, 0.8, 0.2, 0.2], [0.5] * 6])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]]).repeat(3, 1)
    return [scores, torch.arange(18).view(3, 6) + 40, parents, torch.tensor([7, 8, 9]), 5]


def _verified(*, chain: bool) -> Arguments:
    tokens = torch.tensor([[3, 5, 6, 7, 8, 9], [3, 4, 4, 4, 9, 1]])
    predict = torch.tensor([[5, 8, 1, 2, 3, 4], [4, 4, 4, 5, 9, 9]])
    return [tokens, None if chain else PARENTS, predict.flatten(), 5]


def _starts(width: int) -> list[torch.Tensor]:
    """A page table, rows of it and their starts."""
    return [table(4, width).flatten(), torch.tensor([2, 1, 3]), torch.tensor([4, 0, 17])]


def _ahead(page_size: int) -> Arguments:
    starts, ends = torch.tensor([0, 3, 8, 5]), torch.tensor([6, 4, 8, 300])
    opened = sum(
        -(-n // page_size) - -(-m // page_size) for m, n in zip(starts.tolist(), ends.tolist(), strict=True)
    )
    free_pages = torch.arange(60, 60 + opened).flip(0)
    where = [table(5, 400).flatten(), torch.arange(4) + 1, starts, ends, free_pages]
    return [*where, page_size, int((ends - starts).sum()), 400]


for _rows, _vocab, _topk in ((1, 2500, 1), (3, 70, 4)):
    CASES[f"best {_topk} of {_vocab}"] = Case(
        drafts.draft_topk, lambda n=_rows, v=_vocab, k=_topk: [(2 * floats(n, v)).round() / 2, k]
    )
for _page in (1, 4):
    CASES[f"place ahead in pages of {_page}"] = exact(drafts.place_ahead, partial(_ahead, _page))
CASES |= {
    "rotate ids": exact(
        drafts.rotate_ids,
        lambda: [torch.arange(300), torch.tensor([-1, -2, -3]), torch.tensor([1, 297, 2], dtype=INT32)],
    ),
    "draft places": exact(drafts._draft_places, lambda: [*_starts(20), 3, 20]),
    "write rows": exact(
        drafts._write_rows, lambda: [*_starts(300), torch.tensor([3, 280, 0]), torch.arange(283), 300]
    ),
    "pick accepted": Case(drafts.pick_accepted, lambda: [floats(6, 12), torch.tensor([3, 0], dtype=INT32)]),
    "pick the bonus": exact(
        drafts.pick_bonus, lambda: [torch.arange(6), torch.tensor([2, 1, 0], dtype=INT32)]
    ),
    "build a tree": Case(build_tree, _candidates, keep=frozenset({0})),
    "paths of a tree": exact(tree_paths, lambda: [PARENTS, 4]),
    "accept of trees": exact(accept_drafts, partial(_verified, chain=False)),
    "accept of chains": exact(accept_drafts, partial(_verified, chain=True), variant=True),
}
