"""SGLang's CUDA kernels for trees of drafts, as they are written with torch's operators, on the host."""

from __future__ import annotations

import torch

from schedbench.profiles.engines.sglang.kernels import _KERNELS

# Two branches: 10 with the child 11, and 20, behind the root 5.
TOKENS = torch.tensor([[5, 10, 20, 11]])
FIRST_CHILD = torch.tensor([[1, 3, -1, -1]])
NEXT_SIBLING = torch.tensor([[-1, 2, -1, -1]])
NODES = torch.arange(4).view(1, 4)


def verified(kernel: str, *rest: object) -> tuple[list[int], list[int], int]:
    predicts = torch.full((5,), -7, dtype=torch.int32)
    index, count = torch.full((1, 3), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    _KERNELS[kernel](predicts, index, count, TOKENS, NODES, FIRST_CHILD, NEXT_SIBLING, *rest)
    return predicts.tolist(), index[0].tolist(), int(count)


def test_a_tree_is_built_of_the_selected_candidates() -> None:
    """Candidates 0 and 1 continue the root; of those at depth 2, candidate 2 continues candidate 0."""
    parents = torch.tensor([[-1, 0, 1]])
    selected = torch.tensor([[0, 1, 2]])
    lens, mask = torch.tensor([2]), torch.ones(4 * 6, dtype=torch.bool)
    positions, links = (
        torch.zeros(4, dtype=torch.int64),
        [torch.zeros(1, 4, dtype=torch.int64) for _ in range(3)],
    )
    _KERNELS["build_tree_kernel_efficient"](parents, selected, lens, mask, positions, *links, 2, 2, 4, 0)
    assert positions.tolist() == [2, 3, 3, 4]
    assert [part.tolist() for part in links] == [[[0, 1, 2, 3]], FIRST_CHILD.tolist(), NEXT_SIBLING.tolist()]
    seen = mask.view(4, 6)
    assert seen[:, :2].all()
    assert seen[:, 2:].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def test_a_greedy_verify_follows_what_the_target_predicts() -> None:
    walk = verified("verify_tree_greedy", torch.tensor([[10, 11, 0, 33]]))
    assert walk == ([10, 11, -7, 33, -7], [0, 1, 3], 2)
    sibling = verified("verify_tree_greedy", torch.tensor([[20, 11, 44, 33]]))
    assert sibling == ([20, -7, 44, -7, -7], [0, 2, -1], 1)


def test_a_sampled_verify_takes_children_by_the_targets_probabilities() -> None:
    """The coin 0.5 is above the first child's 0.3 and not above the sum of both; behind the second one, token 44."""
    probs = torch.zeros(1, 4, 50)
    probs[0, 0, 10], probs[0, 0, 20], probs[0, 0, 30] = 0.3, 0.4, 0.3
    probs[0, 2, 44] = 1.0
    coins, last, drafts = torch.full((1, 4), 0.5), torch.tensor([0.5]), torch.zeros(1, 4, 50)
    walk = verified("tree_speculative_sampling_target_only", coins, last, probs, drafts)
    assert walk == ([20, -7, 44, -7, -7], [0, 2, -1], 1)
    assert drafts[0, 0].nonzero().tolist() == [[10]]


def test_a_token_behind_rejected_drafts_is_none_of_them() -> None:
    probs = torch.zeros(1, 4, 50)
    probs[0, 0, 10], probs[0, 0, 30] = 0.4, 0.6
    coins, last, drafts = torch.full((1, 4), 0.9), torch.tensor([0.01]), torch.zeros(1, 4, 50)
    walk = verified("tree_speculative_sampling_target_only", coins, last, probs, drafts)
    assert walk == ([30, -7, -7, -7, -7], [0, -1, -1], 0)


def test_probabilities_are_cut_and_have_sum_1() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2]])
    assert torch.allclose(
        _KERNELS["top_k_renorm_prob"](probs, torch.tensor([2])), torch.tensor([[0.625, 0.375, 0]])
    )
    assert torch.allclose(
        _KERNELS["top_p_renorm_prob"](probs, torch.tensor([0.4])), torch.tensor([[1.0, 0, 0]])
    )
