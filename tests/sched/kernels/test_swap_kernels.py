"""Hot buffers compared with a plain model of one: a list in the order of use."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from schedbench.sched.kernels.hot_buffers import (
    SwapPlan,
    back_up,
    map_newest,
    map_prompt,
    plan_swap_in,
    previous_tokens,
    swap_in,
    translate,
    unmap,
)
from schedbench.sched.kernels.sparse import ABSENT

B, PAGE, TOP_K = 12, 4, 8
KV_HEADS, D, LAYERS = 2, 4, 2
ROWS, CONTEXT = 5, 64
SLOTS = 200


def token(row: int, position: int) -> float:
    """Returns the value that stands for the KV of a position."""
    return float(1000 * row + position + 1)


@dataclass
class Buffer:
    """A model of upstream's swap-in: one request and one token at a time."""

    tokens: list[int] = field(default_factory=lambda: list(range(B)))
    lru: list[int] = field(default_factory=lambda: list(range(B)))

    def swap_in(self, chosen: list[int], length: int) -> tuple[dict[int, int], list[int]]:
        """Returns the slot of each chosen position, and the positions that had to be fetched."""
        wanted = [position for position in chosen if position != length - 1]
        hits = {p: self.tokens.index(p) for p in wanted if p in self.tokens}
        missing = [p for p in wanted if p not in hits]
        free = [slot for slot in self.lru if slot not in hits.values()]
        taken = free[: len(missing)]
        for position, slot in zip(missing, taken, strict=True):
            self.tokens[slot] = position
        self.lru = free[len(missing) :] + taken + [slot for slot in self.lru if slot in hits.values()]
        return hits | dict(zip(missing, taken, strict=True)) | {length - 1: B}, missing


@dataclass
class Tables:
    """Every request has its KV on the host from position 0 on, and the first tokens in its buffer."""

    device_buffer: torch.Tensor
    tokens: torch.Tensor
    lru: torch.Tensor
    host_slots: torch.Tensor
    host: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    lookups: torch.Tensor

    @classmethod
    def fresh(cls) -> Tables:
        generator = torch.Generator().manual_seed(3)
        slots = torch.randperm(SLOTS - 1, generator=generator)[: ROWS * (B + PAGE)] + 1
        host_slots = (torch.randperm(ROWS * CONTEXT, generator=generator) + 1).view(ROWS, CONTEXT)
        host = torch.zeros(ROWS * CONTEXT + 1, LAYERS, 2, KV_HEADS, D)
        values = torch.tensor([[token(row, p) for p in range(CONTEXT)] for row in range(ROWS)])
        host[host_slots.flatten(), :, 0] = values.flatten().view(-1, 1, 1, 1)
        host[host_slots.flatten(), :, 1] = -values.flatten().view(-1, 1, 1, 1)
        caches = torch.zeros(SLOTS, KV_HEADS, D), torch.zeros(SLOTS, KV_HEADS, D)
        tables = cls(
            slots.view(ROWS, B + PAGE),
            torch.arange(B, dtype=torch.int32).repeat(ROWS, 1),
            torch.arange(B, dtype=torch.int16).repeat(ROWS, 1),
            host_slots,
            host,
            caches,
            torch.zeros(2, dtype=torch.int64),
        )
        for row in range(ROWS):
            for position in range(B):
                tables.write(row, position, position)
        return tables

    def write(self, row: int, slot: int, position: int) -> None:
        """Writes the KV of a position into a slot of the row's buffer."""
        for sign, cache in zip((1, -1), self.caches, strict=True):
            cache[self.device_buffer[row, slot]] = sign * token(row, position)

    def plan(self, positions: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor) -> SwapPlan:
        return SwapPlan(
            *plan_swap_in(
                positions, rows, lens, self.device_buffer, self.tokens, self.lru, self.lookups, CONTEXT
            )
        )

    def fetch(self, plan: SwapPlan, rows: torch.Tensor) -> None:
        swap_in(*self.caches, self.host[:, 0], self.host_slots, rows, plan.missing, plan.targets)


def chosen(dice: random.Random, length: int) -> list[int]:
    """Chooses ascending positions, the newest among them."""
    others = sorted(dice.sample(range(length - 1), min(length - 1, TOP_K - 1)))
    return [*others, length - 1]


def padded(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([row + [ABSENT] * (TOP_K - len(row)) for row in rows], dtype=torch.int32)


@pytest.mark.parametrize("seed", range(5))
def test_buffers_follow_the_plain_model_step_by_step(seed: int) -> None:
    dice, tables = random.Random(seed), Tables.fresh()
    model = {row: Buffer() for row in range(1, ROWS)}
    lengths = {row: dice.randint(1, B + 10) for row in model}
    asked = missed = 0
    for _ in range(25):
        rows = dice.sample(sorted(model), dice.randint(1, len(model)))
        picks = [chosen(dice, lengths[row]) for row in rows]
        for row in rows:
            tables.write(row, min(lengths[row] - 1, B), lengths[row] - 1)
        lens = torch.tensor([lengths[row] for row in rows])
        plan = tables.plan(padded(picks), torch.tensor(rows), lens)
        tables.fetch(plan, torch.tensor(rows))
        for i, (row, pick) in enumerate(zip(rows, picks, strict=True)):
            missing: list[int] = []
            slots = {position: position for position in pick}
            if lengths[row] > B:
                slots, missing = model[row].swap_in(pick, lengths[row])
                asked, missed = asked + len(pick) - 1, missed + len(missing)
            assert [p for p in plan.missing[i].tolist() if p != ABSENT] == missing
            there = [int(tables.device_buffer[row, slots[position]]) for position in pick]
            assert plan.locations[i].tolist() == there + [0] * (TOP_K - len(pick))
            for sign, cache in zip((1, -1), tables.caches, strict=True):
                held = cache[plan.locations[i, : len(pick)].long(), 0, 0]
                assert held.tolist() == [sign * token(row, position) for position in pick]
            assert tables.tokens[row].tolist() == model[row].tokens
            assert tables.lru[row].tolist() == model[row].lru
            lengths[row] = min(lengths[row] + 1, CONTEXT)
    assert tables.lookups.tolist() == [asked, missed] and 0 < missed < asked


def test_padded_rows_fetch_nothing() -> None:
    """A graph is padded with row 0, one token long, up to its size."""
    tables = Tables.fresh()
    before = tables.tokens.clone(), tables.lru.clone()
    plan = tables.plan(
        padded([[0], [0]]), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    )
    assert (plan.missing == ABSENT).all() and (plan.targets == 0).all()
    assert torch.equal(tables.tokens, before[0]) and torch.equal(tables.lru, before[1])
    assert tables.lookups.tolist() == [0, 0]


def test_a_backup_leaves_out_absent_slots() -> None:
    k = [torch.full((9, KV_HEADS, D), float(layer)) for layer in range(LAYERS)]
    v = [-cache - 1 for cache in k]
    for cache in (*k, *v):
        cache += torch.arange(9).view(-1, 1, 1) * 10
    host = torch.zeros(6, LAYERS, 2, KV_HEADS, D)
    back_up(k, v, host, torch.tensor([7, ABSENT, 3]), torch.tensor([2, 5, 4]))
    for layer in range(LAYERS):
        assert torch.equal(host[[2, 4], layer, 0], k[layer][[7, 3]])
        assert torch.equal(host[[2, 4], layer, 1], v[layer][[7, 3]])
    assert not host[[1, 3, 5]].any()


@pytest.mark.parametrize("page", [1, 4])
def test_prompts_are_mapped_by_page_and_unmapped_whole(page: int) -> None:
    logical = [torch.arange(n) + start * page for n, start in ((6, 1), (3, 10))]
    mapping = torch.zeros(80, dtype=torch.int64)
    free = torch.tensor([9, 4, 7, 2, 5, 1, 3, 8, 6])
    map_prompt(mapping, torch.cat(logical), free, page)
    pages = [
        slot.item() // page for slot in translate(mapping, torch.cat([part[::page] for part in logical]))
    ]
    assert pages == free[: len(pages)].tolist()
    for part in logical:
        held = unmap(mapping, part.to(torch.int32), page)
        assert held.shape[0] == -(-len(part) // page) * page
        assert len(set((held // page).tolist())) == -(-len(part) // page)
        assert (held.view(-1, page) - held[::page, None] == torch.arange(page)).all()
    assert not mapping.any()


def test_the_newest_token_has_its_own_slot_once_the_buffer_is_full() -> None:
    tables, mapping = Tables.fresh(), torch.zeros(50, dtype=torch.int64)
    rows, lens = torch.tensor([1, 2, 3]), torch.tensor([5, B + 1, B + 9])
    map_newest(mapping, torch.tensor([11, 12, 13]), tables.device_buffer, rows, lens, B)
    kept = [int(tables.device_buffer[row, slot]) for row, slot in ((1, 4), (2, B), (3, B))]
    assert mapping[11:14].tolist() == kept


def test_the_previous_token_is_backed_up_unless_it_was_staged() -> None:
    tables = Tables.fresh()
    rows, lens = torch.tensor([1, 2, 3, 4]), torch.tensor([5, B + 1, B + 2, B + 9])
    staged = torch.tensor([0, 3, B, 0, B + 8])
    slots, host = previous_tokens(tables.device_buffer, tables.host_slots, staged, rows, lens, B)
    kept = [int(tables.device_buffer[row, slot]) for row, slot in ((1, 3), (3, B))]
    assert slots.tolist() == [kept[0], ABSENT, kept[1], ABSENT]
    assert host.tolist() == [int(tables.host_slots[row, n - 2]) for row, n in zip(rows, lens, strict=True)]
