"""Fingerprints: one value per prefix however it was computed, and another one after any damage."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.sched.batch import ForwardBatch, ModelOutput
from schedbench.sched.kernels.tags import ROTATION
from schedbench.sched.model.tags import TaggedDecoder, TagPool, audit
from tests.sched.model.stages import bare_stage

CPU = torch.device("cpu")
CONTEXT = 128
PROMPT = [(7 * i) % 50 for i in range(90)]


class EmptyModel:
    """A model without logits."""

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        return ModelOutput(torch.empty(batch.batch_size, 0))


class TaggedStage:
    """A stage whose model computes only tags."""

    def __init__(self, *, page_size: int = 1, seed: int = 0) -> None:
        self.pool = TagPool(slots=8 * CONTEXT + page_size, context_len=CONTEXT, device=CPU)
        self.table = torch.zeros(9, CONTEXT, dtype=torch.int32)
        model = TaggedDecoder(EmptyModel(), pool=self.pool, req_to_token=self.table)
        self.stage = bare_stage(model, self.table, page_size=page_size, seed=seed)

    def run(self, *parts: tuple[Any, int]) -> list[int]:
        return self.output(self.stage.batch(parts))

    def output(self, batch: ForwardBatch) -> list[int]:
        fingerprint = self.stage.model.forward(batch).fingerprint
        return fingerprint.tolist()

    def whole(self, tokens: list[int]) -> int:
        """Returns the fingerprint of ``tokens`` computed in one piece."""
        return self.run((self.stage.enter(tokens), len(tokens)))[0]

    def audit(self, sequence: Any) -> int:
        return audit(self.pool, self.table[sequence.row, : sequence.cached].numpy())


@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 16]))
@settings(max_examples=20)
def test_one_fingerprint_per_prefix(seed: int, page_size: int) -> None:
    rng, truth, mixed = random.Random(seed), TaggedStage(seed=1), TaggedStage(page_size=page_size, seed=seed)
    texts = [[rng.randrange(1000) for _ in range(rng.randint(1, 100))] for _ in range(4)]
    entered = [mixed.stage.enter(text) for text in texts]
    while left := [s for s in entered if s.cached < len(s.tokens)]:
        longest = rng.choice((1, 4, 60))
        step = rng.sample(left, rng.randint(1, len(left)))
        parts = [(s, min(len(s.tokens) - s.cached, rng.randint(1, longest))) for s in step]
        found = mixed.run(*parts)
        assert found == [truth_of(truth, s.tokens[: s.cached]) for s, _ in parts]
    assert [mixed.audit(s) for s in entered] == [0, 0, 0, 0]


def truth_of(scene: TaggedStage, tokens: list[int]) -> int:
    scene.stage.entered.clear()
    scene.stage.refill()
    return scene.whole(tokens)


@given(at=st.integers(0, 89), change=st.integers(1, 2**31))
@settings(max_examples=30)
def test_any_other_token_changes_it(at: int, change: int) -> None:
    other = [*PROMPT[:at], PROMPT[at] + change, *PROMPT[at + 1 :]]

    assert TaggedStage().whole(PROMPT) != TaggedStage().whole(other)


def wrong_slot(scene: TaggedStage, sequence: Any, at: int) -> None:
    scene.table[sequence.row, at] = scene.stage.free[0]


def swapped_slots(scene: TaggedStage, sequence: Any, at: int) -> None:
    first, second = at, (at + 7) % sequence.cached
    row = scene.table[sequence.row]
    row[[first, second]] = row[[second, first]]


def overwritten_slot(scene: TaggedStage, sequence: Any, at: int) -> None:
    other = scene.stage.enter([1, 2])
    scene.table[other.row, :2] = scene.table[sequence.row, [at, at]]
    scene.output(scene.stage.batch_on_given_slots([(other, 2)]))


def stale_slot(scene: TaggedStage, sequence: Any, at: int) -> None:
    """A slot whose write went elsewhere still holds its earlier content."""
    slot = scene.table[sequence.row, at]
    scene.pool.tags[slot], scene.pool.sums[slot] = 11, 12


DAMAGES = [wrong_slot, swapped_slots, overwritten_slot, stale_slot]


@pytest.mark.parametrize("damage", DAMAGES)
@given(at=st.integers(0, 79))
@settings(max_examples=25)
def test_damage_changes_the_next_extend(damage: Any, at: int) -> None:
    broken = TaggedStage()
    sequence = broken.stage.enter(PROMPT)
    broken.run((sequence, 80))
    assert broken.audit(sequence) == 0

    damage(broken, sequence, at)

    assert broken.audit(sequence) != 0
    assert broken.run((sequence, 10)) != [TaggedStage().whole(PROMPT)]


@pytest.mark.wide
@pytest.mark.parametrize("damage", DAMAGES)
@given(at=st.integers(0, 59))
@settings(max_examples=15)
def test_damage_changes_one_of_the_next_sixteen_decodes(damage: Any, at: int) -> None:
    broken, intact = TaggedStage(), TaggedStage()
    sick, sound = broken.stage.enter(PROMPT), intact.stage.enter(PROMPT)
    broken.run((sick, 60))
    intact.run((sound, 60))

    damage(broken, sick, at)

    steps = [broken.run((sick, 1)) == intact.run((sound, 1)) for _ in range(ROTATION)]
    assert not all(steps)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_length_changes_it(shift: int) -> None:
    broken, intact = TaggedStage(), TaggedStage()
    sick, sound = broken.stage.enter(PROMPT), intact.stage.enter(PROMPT)
    broken.run((sick, 20))
    intact.run((sound, 20))
    batch = broken.stage.batch([(sick, 1)])
    batch.seq_lens += shift

    assert broken.output(batch) != intact.run((sound, 1))


def test_padding_does_not_change_other_requests() -> None:
    padded, plain = TaggedStage(), TaggedStage()
    first, second = padded.stage.enter(PROMPT), plain.stage.enter(PROMPT)
    padded.run((first, 40))
    plain.run((second, 40))
    batch = padded.stage.batch([(first, 1)])
    for name, filler in (("input_ids", 0), ("req_pool_indices", 0), ("seq_lens", 1), ("out_cache_loc", 0)):
        real = getattr(batch, name)
        setattr(batch, name, torch.cat([real, torch.full((3,), filler)]))

    assert padded.output(batch)[:1] == plain.run((second, 1))
    assert padded.audit(first) == 0


def test_indices_out_of_range_raise_no_error_and_change_the_fingerprint() -> None:
    wild = TaggedStage()
    sequence = wild.stage.enter(PROMPT)
    wild.run((sequence, 30))
    batch = wild.stage.batch([(sequence, 1)])
    batch.req_pool_indices += 10**12
    batch.out_cache_loc -= 10**12
    batch.input_ids += 10**12

    assert wild.output(batch) != [TaggedStage().whole(PROMPT[:31])]


def test_an_empty_request_is_intact() -> None:
    pool = TagPool(slots=4, context_len=8, device=CPU)

    assert audit(pool, torch.empty(0, dtype=torch.int32).numpy()) == 0
