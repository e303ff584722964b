"""Cases of draws, their filters and scores."""

from __future__ import annotations

from functools import partial

import torch

from schedbench.sched.kernels.sampling import Draw, sample, sample_greedy, score_tokens
from tests.sched.kernels.triton_cases.case import INT32, Arguments, Case, floats

CASES: dict[str, Case] = {}


def _vocab_mask(rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator)
    return (bits | 1).to(INT32)


def _packed(*columns: torch.Tensor) -> list[torch.Tensor]:
    """Columns [n] as views of one tensor, as parameters of requests arrive on the device."""
    return list(torch.stack(columns, 1).unbind(1))


def _draw(vocab: int, *, masked: bool, filtered: bool) -> Draw:
    """Six rows, one of them greedy, one with many equals; filters of all kinds, alone and together."""
    logits = 3 * floats(6, vocab)
    logits[0] = 0  # the noise alone decides
    logits[4] = (3 * floats(vocab, seed=1)).round()
    temperatures, top_ps, min_ps = _packed(
        torch.tensor([1.0, 0.0, 0.7, 1.3, 1.0, 2.0]),
        torch.tensor([1.0, 0.9, 1.0, 0.8, 0.6, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.1]),
    )
    keys = _packed(
        torch.tensor([3, -5, 1 << 62, -(1 << 63), 0, 77]), torch.tensor([0, 9, 4095, 1, 2, 100000])
    )
    return Draw(
        logits,
        temperatures.unsqueeze(1),
        torch.tensor([vocab, vocab, 5, vocab, 7, 1], dtype=INT32),
        top_ps,
        min_ps,
        *keys,
        _vocab_mask(6, vocab) if masked else None,
        filtered=filtered,
    )


def _scored(vocab: int, *, masked: bool, filtered: bool) -> Arguments:
    draw = _draw(vocab, masked=masked, filtered=filtered)
    return [*draw, sample(*draw)]


CASES["greedy with equals"] = Case(sample_greedy, lambda: [(3 * floats(3, 2500)).round(), None])
CASES["greedy of those allowed"] = Case(sample_greedy, lambda: [floats(1, 70), _vocab_mask(1, 70)])
for _vocab, _masked, _filtered in (
    (1500, False, False),
    (37, True, False),
    (1300, True, True),
    (80, False, True),
):
    _what = f"{_vocab} ids{', masked' * _masked}{', filtered' * _filtered}"
    for _op, _make in ((sample, _draw), (score_tokens, _scored)):
        CASES[f"{_op.__name__.removesuffix('.default')} of {_what}"] = Case(
            _op,
            partial(_make, _vocab, masked=_masked, filtered=_filtered),
            keep=frozenset({1, 3, 4}),
            variant=_masked and _filtered,
        )
