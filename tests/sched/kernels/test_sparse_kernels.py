"""The indexer's choice compared with a plain one, and attention to the chosen positions, wherever their KV is
stored."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from schedbench.sched.kernels.attention import attention
from schedbench.sched.kernels.sparse import (
    ABSENT,
    index_and_store,
    page_lookup,
    select_simulated,
    select_top_k,
    sparse_attention,
    sparse_extend,
)

HEADS, D = 3, 16
CONTEXT = 200
LENGTHS = torch.tensor([1, 5, 64, 65, 150])
ROWS = torch.tensor([2, 5, 1, 3, 4])
TOP_K = 20


@pytest.fixture
def table() -> torch.Tensor:
    """[6, 200] int32: no slot twice, none of them 0."""
    order = torch.randperm(6 * CONTEXT, generator=torch.Generator().manual_seed(1)) + 1
    return order.view(6, CONTEXT).to(torch.int32)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scored(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of one token: q [heads, d], weights [heads], keys [n, d]."""
    return (weights[:, None] * (q @ keys.T).clamp(min=0)).sum(0)


def test_the_best_positions_are_chosen_in_the_order_of_the_tokens(table: torch.Tensor) -> None:
    q, weights, cache = random(5, HEADS, D), random(5, HEADS, seed=1), random(6 * CONTEXT + 1, D, seed=2)
    found = select_top_k(q, weights, cache, table, ROWS, LENGTHS, TOP_K, CONTEXT)
    for i, (row, length) in enumerate(zip(ROWS.tolist(), LENGTHS.tolist(), strict=True)):
        scores = scored(q[i].double(), weights[i].double(), cache[table[row, :length].long()].double())
        best = sorted(scores.sort(descending=True, stable=True).indices[:TOP_K].tolist())
        assert found[i].tolist() == best + [ABSENT] * (TOP_K - len(best))


def test_ties_go_to_the_earlier_token(table: torch.Tensor) -> None:
    """Where no key agrees with a query, every score is 0."""
    q, weights = -torch.ones(1, HEADS, D), torch.ones(1, HEADS)
    found = select_top_k(
        q, weights, torch.ones(6 * CONTEXT + 1, D), table, ROWS[4:], LENGTHS[4:], TOP_K, CONTEXT
    )
    assert found[0].tolist() == list(range(TOP_K))


def test_keys_are_stored_and_queries_and_weights_are_split_off() -> None:
    cache, projected = torch.zeros(9, D), random(2, (HEADS + 1) * D + HEADS)
    q, weights = index_and_store(projected, torch.tensor([4, 7]), cache, HEADS)
    assert torch.equal(q.flatten(1), projected[:, : HEADS * D])
    assert torch.equal(cache[[4, 7]], projected[:, HEADS * D : -HEADS])
    assert torch.equal(weights, projected[:, -HEADS:])


def caches(slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(slots, 2, D, seed=3), random(slots, 2, D, seed=4)


def test_choosing_every_position_equals_dense_attention(table: torch.Tensor) -> None:
    """The results are equal bit for bit, because the sums are the same."""
    k, v = caches(6 * CONTEXT + 1)
    q = random(5, 4, D)
    every = torch.arange(CONTEXT, dtype=torch.int32).expand(5, CONTEXT)
    positions = every.where(every < LENGTHS[:, None], ABSENT)
    slots = page_lookup(positions, table, ROWS)
    sparse = sparse_attention(q, k, v, slots, LENGTHS, 0.25)
    assert torch.equal(sparse, attention(q, k, v, table, ROWS, LENGTHS, None, 0.25, CONTEXT, 1))


def test_the_result_does_not_depend_on_the_slots_of_kv(table: torch.Tensor) -> None:
    k, v = caches(6 * CONTEXT + 1)
    q, index_q, weights = random(5, 4, D), random(5, HEADS, D, seed=5), random(5, HEADS, seed=6)
    positions = select_top_k(
        index_q, weights, random(6 * CONTEXT + 1, D, seed=2), table, ROWS, LENGTHS, TOP_K, CONTEXT
    )
    slots = page_lookup(positions, table, ROWS)
    elsewhere = torch.randperm(6 * CONTEXT + 1, generator=torch.Generator().manual_seed(9))
    moved_k, moved_v = torch.empty_like(k), torch.empty_like(v)
    moved_k[elsewhere], moved_v[elsewhere] = k, v
    moved = elsewhere[slots.long()].to(torch.int32)
    here = sparse_attention(q, k, v, slots, LENGTHS, 0.25)
    assert torch.equal(sparse_attention(q, moved_k, moved_v, moved, LENGTHS, 0.25), here)


@pytest.mark.parametrize("mapped", [False, True])
def test_an_extend_equals_its_decodes(table: torch.Tensor, mapped: bool) -> None:
    slots = 6 * CONTEXT + 1
    (k, v), index = caches(slots), random(slots, D, seed=2)
    new = torch.tensor([1, 3, 64, 2, 40], dtype=torch.int32)
    total = int(new.sum())
    q, index_q, weights = random(total, 4, D), random(total, HEADS, D, seed=5), random(total, HEADS, seed=6)
    owner = torch.arange(5).repeat_interleave(new)
    positions = torch.cat(
        [torch.arange(n - m, n) for n, m in zip(LENGTHS.tolist(), new.tolist(), strict=True)]
    )
    mapping = torch.randperm(slots, generator=torch.Generator().manual_seed(7)) if mapped else None
    extended = sparse_extend(
        q, k, v, index_q, weights, index, table, mapping, ROWS, positions, LENGTHS, new, 0.25, TOP_K, CONTEXT
    )
    chosen = select_top_k(index_q, weights, index, table, ROWS[owner], positions + 1, TOP_K, CONTEXT)
    places = page_lookup(chosen, table, ROWS[owner])
    if mapping is not None:
        places = mapping[places.long()].to(torch.int32)
    assert torch.equal(extended, sparse_attention(q, k, v, places, positions + 1, 0.25))


class TestSimulatedSelection:
    """``select_simulated``, which chooses at random and scores nothing."""

    def chosen(self, lengths: torch.Tensor, top_k: int, reuse: float) -> list[list[int]]:
        nothing = torch.empty(0)
        rows = torch.zeros_like(lengths)
        found = select_simulated(nothing, nothing, nothing, nothing, rows, lengths, top_k, reuse)
        lists: list[list[int]] = found.tolist()
        return lists

    @pytest.mark.parametrize("top_k", [2, 20, 64])
    @pytest.mark.parametrize("reuse", [0.0, 0.9, 1.0])
    def test_a_choice_ascends_without_repeats_and_includes_the_newest(self, top_k: int, reuse: float) -> None:
        lengths = torch.arange(1, 400)
        for length, row in zip(lengths.tolist(), self.chosen(lengths, top_k, reuse), strict=True):
            real = [position for position in row if position != ABSENT]
            assert row == real + [ABSENT] * (top_k - len(real))
            assert len(real) == min(length, top_k) == len(set(real))
            assert real == sorted(real) and real[-1] == length - 1 and real[0] >= 0

    @pytest.mark.parametrize("reuse", [0.0, 0.5, 0.9, 0.98])
    def test_a_step_repeats_the_given_share_of_the_choice_before(self, reuse: float) -> None:
        """The lengths lie in a range in which the sequence is not divided anew."""
        rows = self.chosen(torch.arange(33_000, 33_100), 1024, reuse)
        shares = [len(set(a[:-1]) & set(b[:-1])) / 1023 for a, b in pairwise(rows)]
        assert sum(shares) / len(shares) == pytest.approx(reuse, abs=0.05)

    def test_choices_come_from_the_whole_sequence(self) -> None:
        [row] = self.chosen(torch.tensor([6000]), 2048, 0.9)
        assert row[-2] > 5800 and row[0] < 10
