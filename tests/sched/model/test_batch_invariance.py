"""A request's logits do not depend, in any bit, on its batch or on how it was chunked. The reference is every sequence
decoded alone in one thread, a token at a time. It is compared with random schedules: chunks, batches, decodes mixed
into extends, scattered pages, other requests, one thread and two."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from schedbench.sched.kernels import compiled
from schedbench.sched.model.config import PRESETS
from schedbench.sched.model.weights import Weights, seeded_weights
from tests.sched.model.stages import ModelStage, decoder_stage

CPU = torch.device("cpu")
LENGTHS = (1, 30, 63, 64, 65, 129)
Truth = dict[tuple[int, int], torch.Tensor]  # (sequence, length) → logits


def sequences(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def one_by_one(stage: ModelStage, tokens: list[list[int]]) -> Truth:
    truth: Truth = {}
    for i, ids in enumerate(tokens):
        sequence = stage.enter(ids)
        for length in range(1, len(ids) + 1):
            truth[i, length] = stage.logits((sequence, 1))[0]
    return truth


def schedule(rng: random.Random, left: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Steps of (sequence, tokens to compute), until nothing is left; decodes and chunks in any mix."""
    while any(left):
        waiting = [i for i, n in enumerate(left) if n]
        step = rng.sample(waiting, rng.randint(1, len(waiting)))
        longest = rng.choice((1, 1, 3, 20, 200))
        parts = [(i, min(left[i], rng.randint(1, longest))) for i in step]
        for i, n in parts:
            left[i] -= n
        yield parts


def differing(
    stage: ModelStage, tokens: list[list[int]], truth: Truth, rng: random.Random
) -> list[tuple[int, int]]:
    order = rng.sample(range(len(tokens)), len(tokens))
    entered = {i: stage.enter(tokens[i]) for i in order}
    wrong = []
    for parts in schedule(rng, [len(ids) for ids in tokens]):
        logits = stage.logits(*((entered[i], n) for i, n in parts))
        keys = [(i, entered[i].cached) for i, _ in parts]
        wrong += [key for key, row in zip(keys, logits, strict=True) if not torch.equal(row, truth[key])]
    return wrong


@pytest.mark.parametrize(
    ("preset", "dtype", "numba"),
    [
        ("tiny-llama", torch.float32, True),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in (
                ("tiny-llama", torch.float32, False),
                ("tiny-llama", torch.float64, True),
                ("tiny-qwen3", torch.float32, True),
                ("tiny-qwen3", torch.float64, True),
                ("tiny-qwen3", torch.float64, False),
                ("tiny-sparse", torch.float32, True),
                ("tiny-sparse", torch.float32, False),
                ("tiny-sparse", torch.float64, True),
            )
        ),
    ],
)
def test_no_schedule_changes_a_bit(
    preset: str, dtype: torch.dtype, numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not numba:
        monkeypatch.setattr(compiled, "_compiled", lambda _: None)
    config = replace(PRESETS[preset], dtype_name=str(dtype).removeprefix("torch."))
    weights: Weights = seeded_weights(config, seed=1, device=CPU)
    tokens = sequences(config.vocab_size)
    truth = one_by_one(decoder_stage(config, weights), tokens)

    wrong = []
    for seed in range(4):
        torch.set_num_threads(2 if seed < 2 else 1)
        busy = decoder_stage(config, weights, page_size=(1, 16)[seed % 2], seed=seed)
        wrong += [(seed, *key) for key in differing(busy, tokens, truth, random.Random(seed))]

    assert wrong == []
