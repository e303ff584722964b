"""Kernels of speculation compared with plain loops."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from schedbench.sched.kernels import drafts, verify
from schedbench.sched.kernels.attention import attention, tree_attention

INT32, INT64 = torch.int32, torch.int64
B, D, STEPS, VOCAB = 3, 5, 3, 11
TABLE = torch.arange(4 * 40, dtype=INT32).view(4, 40)
ROWS, LENS = torch.tensor([2, 1, 3]), torch.tensor([5, 17, 2])


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape: int, below: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)))


PARENTS = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]])


def tree_args() -> list[Any]:
    paths, counts = verify.tree_paths(PARENTS, STEPS + 2)
    branches = paths.clamp(min=0).view(B * D, -1) + 100
    lens = (LENS.unsqueeze(1) + counts).view(-1)
    caches = [floats(200, 2, 8), floats(201, 2, 8)[:200]]
    rows = ROWS.repeat_interleave(D)
    return [floats(B * D, 4, 8), *caches, TABLE, rows, lens, branches, counts.view(-1), 0.25, 40]


def test_draft_topk_sorts_tokens_by_probability() -> None:
    logits = floats(4, VOCAB)
    topk_p, topk_index = drafts.draft_topk(logits, VOCAB)
    torch.testing.assert_close(topk_p.sum(1), torch.ones(4))
    assert torch.equal(topk_index, logits.sort(dim=1, descending=True).indices)


def test_rotation_stays_within_each_request() -> None:
    rotated = drafts.rotate_ids(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([8, 9]), torch.tensor([3, 2]))
    assert rotated.tolist() == [2, 3, 8, 5, 9]


@pytest.mark.parametrize("page", [1, 4])
def test_place_ahead_allocates_distinct_slots_per_request(page: int) -> None:
    table, free = torch.zeros(4, 40, dtype=INT32), torch.arange(5, 40)
    starts, ends = torch.tensor([0, 4, 8]), torch.tensor([6, 9, 8])
    drafts.place_ahead(table.view(-1), ROWS, starts, ends, free, page, 11, table.shape[1])
    first = [int(free[0]) * page + k for k in range(6)]
    assert table[2, :6].tolist() == first
    held = table[2, :6].tolist() + table[1, 4:9].tolist()
    assert len(set(held)) == len(held)
    assert not table[3].any()
    if page > 1:
        assert table[1, 4].item() % page == 0


def grown(rng: random.Random) -> tuple[list[int], list[int], list[float]]:
    """Candidates of a tree: tokens, parents and scores, where no score exceeds its parent's."""
    tokens, parents, scores = [], [], []
    for k in range(12):
        parent = rng.choice([-1, *range(k)])
        above = 1.0 if parent < 0 else scores[parent]
        tokens.append(rng.randrange(4))
        parents.append(parent)
        scores.append(above * rng.choice([1.0, 0.5, 0.25]))
    return tokens, parents, scores


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_has_the_best_candidates_each_with_its_parent(seed: int) -> None:
    tokens, parents, scores = grown(random.Random(seed))
    made, above = verify.build_tree(
        torch.tensor([scores]), torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([7]), 6
    )
    chosen = sorted(sorted(range(12), key=lambda k: -scores[k])[:5])
    nodes = {candidate: node for node, candidate in enumerate(chosen, 1)}
    assert made[0].tolist() == [7, *(tokens[k] for k in chosen)]
    assert above[0].tolist() == [-1, *(nodes[parents[k]] if parents[k] >= 0 else 0 for k in chosen)]


def test_paths_and_links_of_a_tree() -> None:
    paths, counts = verify.tree_paths(PARENTS, 5)
    assert paths[0].tolist() == [
        [0, -1, -1, -1, -1],
        [0, 1, -1, -1, -1],
        [0, 2, -1, -1, -1],
        [0, 1, 3, -1, -1],
        [0, 1, 3, 4, -1],
    ]
    assert counts.tolist() == [[1, 2, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 2, 2, 2]]
    children, siblings = verify.tree_links(PARENTS)
    assert children.tolist() == [[1, 3, -1, 4, -1], [1, 2, 3, 4, -1], [1, -1, -1, -1, -1]]
    assert siblings.tolist() == [[-1, 2, -1, -1, -1], [-1] * 5, [-1, 2, 3, 4, -1]]


def walked(tokens: list[int], parents: list[int], predict: list[int], most: int) -> list[int]:
    node, found = 0, [0]
    while len(found) < most:
        fitting = [k for k in range(D) if parents[k] == node and tokens[k] == predict[node]]
        if not fitting:
            break
        node = fitting[0]
        found.append(node)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_accepted_drafts_are_those_that_the_target_predicts(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, predict = (torch.randint(0, 2, (B, D), generator=generator) for _ in range(2))
    places, lens = verify.accept_drafts(tokens, PARENTS, predict.view(-1), 4)
    for i in range(B):
        meant = walked(tokens[i].tolist(), PARENTS[i].tolist(), predict[i].tolist(), 4)
        assert lens[i] == len(meant)
        assert places[i].tolist() == [i * D + node for node in meant] + [-1] * (4 - len(meant))


def test_a_tree_node_attends_bit_for_bit_as_a_decode() -> None:
    """A decode whose row of the page table holds the slots of the node's ancestors gives the same result."""
    args = tree_args()
    q, k_cache, v_cache, _, _, lens, branches, counts, scale, longest = args
    seen = tree_attention(*args)
    for token in range(B * D):
        row = TABLE[ROWS[token // D]].clone()
        start, count = int(lens[token] - counts[token]), int(counts[token])
        row[start : start + count] = branches[token, :count].to(INT32)
        alone = attention(
            q[token : token + 1],
            k_cache,
            v_cache,
            row.unsqueeze(0),
            torch.tensor([0]),
            lens[token : token + 1],
            None,
            scale,
            longest,
            1,
        )
        assert torch.equal(seen[token], alone[0])


@pytest.mark.parametrize("adds", [True, False])
def test_penalties_along_a_path_equal_those_of_single_tokens(adds: bool) -> None:
    state, values = floats(B, VOCAB), floats(B, 1)
    paths = torch.tensor([[4, 4, 2], [3, -1, -1], [-1, -1, -1]] * B)
    found = verify.along_paths(state, values, paths, adds)
    for node, path in enumerate(paths.tolist()):
        meant = state[node // B].clone()
        for token in path:
            if token >= 0:
                meant[token] = meant[token] + values[node // B, 0] if adds else values[node // B, 0]
        assert torch.equal(found[node], meant)


def test_simulated_lengths_are_keyed_by_request_and_ordinal() -> None:
    seeds, ordinals = torch.arange(2000) * 977, torch.zeros(2000, dtype=INT64)
    for rounded in (False, True):
        drawn = verify.simulated_lengths(seeds, ordinals, 2.25, rounded=rounded)
        assert torch.equal(drawn, verify.simulated_lengths(seeds, ordinals, 2.25, rounded=rounded))
        assert not torch.equal(drawn, verify.simulated_lengths(seeds, ordinals + 1, 2.25, rounded=rounded))
        assert drawn.double().mean().item() == pytest.approx(2.25, abs=0.06)
    assert set(verify.simulated_lengths(seeds, ordinals, 2.25, rounded=False).tolist()) == {2, 3}


def test_simulated_acceptance_counts_the_verifies_of_each_request() -> None:
    counters, predict = torch.zeros(4, dtype=INT64), ids(B * D)
    seeds = torch.tensor([5, 6, 7])
    for ordinal in range(3):
        _, lens = verify.accept_simulated(counters, ROWS, seeds, predict, D, 2.5, False, 0)
        assert (
            lens.tolist()
            == verify.simulated_lengths(seeds, torch.full((3,), ordinal), 2.5, rounded=False).tolist()
        )
    assert counters.tolist() == [0, 3, 3, 3]
    assert set(predict.tolist()) == {verify.SIMULATED_TOKEN}
