"""Keyed draws: the noise, its independence of the batch, and the filters."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schedbench.sched.kernels.declare import kernels
from schedbench.sched.kernels.sampling import (
    Draw,
    gumbel_noise,
    row_seed,
    sample,
    sample_greedy,
    sample_greedy_tagged,
    sample_tagged,
    score_tokens,
)
from tests.sched.sampling.rows import draw_of

WORD32, WORD64 = (1 << 32) - 1, (1 << 64) - 1


def splitmix64(word: int) -> int:
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & WORD64
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & WORD64
    return word ^ word >> 31


def lowbias32(word: int) -> int:
    word = ((word ^ word >> 16) * 0x7FEB352D) & WORD32
    word = ((word ^ word >> 15) * 0x846CA68B) & WORD32
    return word ^ word >> 16


def noise_by_integers(seed: int, position: int, token: int) -> float:
    """The documented noise: words in unsigned arithmetic of unlimited width, with draws rounded to float32."""
    key = splitmix64((seed + (position + 1) * 0x9E3779B97F4A7C15) & WORD64)
    word = lowbias32(lowbias32((token + (key & WORD32)) & WORD32) ^ key >> 32)
    uniform = np.float32(word & 0x7FFFFFFF) * np.float32(2.0**-31) + np.float32(2.0**-32)
    return -math.log(-math.log1p(-min(float(uniform), 1 - 2.0**-24)))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
@example(seed=-11801, position=9174799)  # so near one that float32 has few numbers left
def test_noise_is_the_documented_hash(seed: int, position: int) -> None:
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 7)[0]
    expected = [noise_by_integers(seed, position, token) for token in range(7)]
    assert noise.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_row_seeds_are_distinct_and_signed() -> None:
    seeds = {row_seed(seed, index) for seed in range(20) for index in range(200)}
    assert len(seeds) == 4000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert row_seed(3, 4) == (splitmix64((splitmix64(3) + 5) & WORD64) ^ 1 << 63) - (1 << 63)


def test_noise_is_gumbel_and_uncorrelated_along_every_axis() -> None:
    seeds = torch.tensor([row_seed(1, i) for i in range(100)]).repeat_interleave(20)
    noise = gumbel_noise(seeds, torch.arange(20).repeat(100), 500).double().view(100, 20, 500)
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.006)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    centred = noise - noise.mean()
    for axis in range(3):
        shifted = centred.narrow(axis, 1, centred.shape[axis] - 1)
        product = (shifted * centred.narrow(axis, 0, centred.shape[axis] - 1)).mean()
        assert abs(product.item()) < 0.01


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("varies", ["request", "position"])
def test_draws_follow_the_distribution(varies: str, temperature: float) -> None:
    draws = 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 0.5, -3.0, 1.5]])
    draw = draw_of(logits.expand(draws, -1), temperature=temperature)
    if varies == "position":
        draw = draw._replace(seeds=torch.full((draws,), row_seed(9, 9)))
    else:
        draw = draw._replace(positions=torch.full((draws,), 17))
    expected = (logits[0].double() / temperature).softmax(0) * draws
    counts = torch.bincount(sample(*draw), minlength=8)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 40.5  # the 1 - 1e-6 quantile for 7 degrees of freedom


def varied_draw(*, rows: int, vocab: int, dtype: torch.dtype) -> Draw:
    """Every kind of row in one batch, filters and greedy rows included."""
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(vocab), dtype=dtype)
    return draw_of(
        logits,
        temperature=[(0.0, 1.0, 0.6, 1.7)[i % 4] for i in range(rows)],
        top_k=[(0, 5, 0, 40, 0)[i % 5] for i in range(rows)],
        top_p=[(1.0, 0.7, 0.95)[i % 3] for i in range(rows)],
        min_p=[(0.0, 0.0, 0.05, 0.0, 0.2, 0.0, 0.0)[i % 7] for i in range(rows)],
        positions=torch.arange(rows) * 31,
    )


def picked(draw: Draw, rows: torch.Tensor) -> Draw:
    return Draw(*(field[rows] if isinstance(field, torch.Tensor) else field for field in draw))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_does_not_depend_on_its_batch(threads: int, dtype: torch.dtype) -> None:
    whole = varied_draw(rows=70, vocab=1003, dtype=dtype)
    ids = sample(*whole)
    scores = score_tokens(*whole, ids)
    generator = torch.Generator().manual_seed(threads)
    for size in (1, 2, 3, 7, 16, 33, 69):
        rows = torch.randperm(70, generator=generator)[:size]
        part = picked(whole, rows)
        assert torch.equal(sample(*part), ids[rows])
        for got, expected in zip(score_tokens(*part, ids[rows]), scores, strict=True):
            assert torch.equal(got, expected[rows])


@pytest.mark.usefixtures("threads")
def test_noise_bits_do_not_depend_on_the_batch() -> None:
    seeds, positions = torch.tensor([row_seed(2, i) for i in range(80)]), torch.arange(80)
    whole = gumbel_noise(seeds, positions, 1003)
    for i in range(80):
        assert torch.equal(gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 1003)[0], whole[i])


def test_unused_filters_and_full_masks_change_nothing() -> None:
    draw = draw_of(torch.randn((50, 97), generator=torch.Generator().manual_seed(0)) * 8)
    ids = sample(*draw)
    assert torch.equal(ids, sample(*draw._replace(filtered=True)))
    full = torch.full((50, 4), -1, dtype=torch.int32)
    assert torch.equal(ids, sample(*draw._replace(vocab_mask=full)))


def kept_by_definition(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total, before, kept = sum(weights), 0.0, set()
    for rank, (token, weight) in enumerate(zip(order, weights, strict=True)):
        reached = top_p < 1 and before >= top_p * total
        if rank == 0 or not (reached or weight < min_p or (top_k and rank >= top_k)):
            kept.add(token)
        before += weight
    return kept


@settings(max_examples=60)
@given(
    logits=st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 2.25]), min_size=3, max_size=12),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.0, 0.123, 0.31, 0.517, 0.777, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.13, 0.41, 0.97]),
)
def test_filters_follow_their_definitions(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    rows = 1500
    kept = kept_by_definition(logits, top_k, top_p, min_p)
    draw = draw_of(
        torch.tensor([logits]).expand(rows, -1), top_k=top_k, top_p=top_p, min_p=min_p, filtered=True
    )
    drawn = set(sample(*draw).tolist())
    assert drawn <= kept
    mass = sum(math.exp(logits[i]) for i in kept)
    assert drawn >= {i for i in kept if math.exp(logits[i]) / mass > 0.02}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.zeros((2000, 4))
    drawn = {p: set(sample(*draw_of(logits, top_p=p)).tolist()) for p in (0.25, 0.5, 0.501, 0.75)}
    assert drawn == {0.25: {0}, 0.5: {0, 1}, 0.501: {0, 1, 2}, 0.75: {0, 1, 2}}


def test_greedy_rows_take_the_lowest_of_the_largest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -1.0, -0.5]])
    draw = draw_of(logits, temperature=[0.0, 0.0, 0.0], top_k=2)
    assert sample_greedy(logits, None).tolist() == [1, 0, 3]
    assert sample(*draw).tolist() == [1, 0, 3]
    assert sample(*draw._replace(filtered=False)).tolist() == [1, 0, 3]


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 69), min_size=1), min_size=1, max_size=5))
def test_only_allowed_ids_are_chosen(allowed: list[set[int]]) -> None:
    words = [[sum(1 << i % 32 for i in ids if i // 32 == word) for word in range(3)] for ids in allowed]
    mask = torch.tensor(words).to(torch.int32)
    logits = torch.randn((len(allowed), 70), generator=torch.Generator().manual_seed(len(allowed)))
    draw = draw_of(logits, vocab_mask=mask, top_p=0.9, top_k=3)
    greedy = [max(ids, key=lambda i: (logits[row, i].item(), -i)) for row, ids in enumerate(allowed)]
    assert sample_greedy(logits, mask).tolist() == greedy
    assert all(token in ids for token, ids in zip(sample(*draw).tolist(), allowed, strict=True))
    fingerprint = torch.arange(len(allowed)) * 977
    tagged = sample_tagged(*draw, fingerprint).tolist()
    ranks = [
        (splitmix64(f) & (WORD64 >> 1)) % len(ids)
        for f, ids in zip(fingerprint.tolist(), allowed, strict=True)
    ]
    assert tagged == [sorted(ids)[rank] for rank, ids in zip(ranks, allowed, strict=True)]
    assert sample_greedy_tagged(logits, mask, fingerprint).tolist() == tagged


def test_tagged_ids_need_no_logits_and_spread_evenly() -> None:
    rows, vocab = 20_000, 16
    logits = torch.empty_strided((rows, vocab), (vocab, 1), dtype=torch.float32, device="meta")
    fingerprint = torch.arange(rows) - rows // 2
    ids = kernels()[sample_greedy_tagged].impl(logits, None, fingerprint)
    assert kernels()[sample_greedy_tagged].unread_floats and kernels()[sample_tagged].unread_floats
    counts = torch.bincount(ids, minlength=vocab)
    assert ((counts - rows / vocab) ** 2 / (rows / vocab)).sum().item() < 56.5  # 1 - 1e-6 for 15 degrees
    draw = draw_of(torch.zeros((rows, vocab)))._replace(logits=logits)
    assert torch.equal(kernels()[sample_tagged].impl(*draw, fingerprint), ids)


def test_scores_are_log_probability_and_margin() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.5, -3.0], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    draw = draw_of(
        logits, temperature=[0.0, 0.5, 0.5], vocab_mask=torch.tensor([[15], [15], [7]], dtype=torch.int32)
    )
    ids = sample(*draw)
    logprobs, margins = score_tokens(*draw, ids)
    rows = [logits[0], logits[1] / 0.5, torch.tensor([0.0, 2.0, 4.0, -torch.inf])]
    expected = [row.log_softmax(0)[token].item() for row, token in zip(rows, ids.tolist(), strict=True)]
    assert logprobs.tolist() == pytest.approx(expected, rel=1e-5)
    assert margins[0].item() == 1.5
    noisy = logits[1] / 0.5 + gumbel_noise(draw.seeds, draw.positions, 4)[1]
    best, second = noisy.sort(descending=True).values[:2].tolist()
    assert margins[1].item() == pytest.approx((best - second) * 0.5, rel=1e-5)
