"""Penalties compared with a plain model of them, while requests join, leave and return."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.sched.config import SamplingParams
from schedbench.sched.model.penalties import PenalizerOrchestrator
from tests.sched.sampling.rows import CONFIG, penalties_of

F32 = np.float32

PARAMS = st.just(SamplingParams()) | st.builds(
    SamplingParams,
    frequency_penalty=st.sampled_from([0.0, 0.1, 0.7, -0.3]),
    presence_penalty=st.sampled_from([0.0, 0.45]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    min_new_tokens=st.sampled_from([0, 0, 1, 4]),
    stop_token_ids=st.sampled_from([(), (11,), (3, 12)]),
)
TOKENS = st.integers(0, 9)


@dataclass
class PlainRow:
    params: SamplingParams
    seen: list[int] = field(default_factory=list)

    def penalised(self, logits: np.ndarray, eos: tuple[int, ...]) -> np.ndarray:
        p, logits = self.params, logits.copy()
        counts = Counter(self.seen)
        for token, count in counts.items():
            logits[token] -= np.cumsum(np.full(count, p.frequency_penalty, F32), dtype=F32)[-1]
        if len(self.seen) < p.min_new_tokens:
            logits[[*p.stop_token_ids, *eos]] = -np.inf
        for token in counts:
            logits[token] -= F32(p.presence_penalty)
        for token in counts:
            factor = F32(p.repetition_penalty)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        return logits


def plain_penalised(rows: list[PlainRow], logits: torch.Tensor) -> torch.Tensor:
    penalised = [
        row.penalised(line.numpy(), CONFIG.eos_token_ids) for row, line in zip(rows, logits, strict=True)
    ]
    return torch.tensor(np.stack(penalised))


def some_logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(rows)) * 3


@settings(max_examples=80)
@given(st.data())
def test_rows_follow_the_batch(data: st.DataObject) -> None:
    def joining() -> tuple[PenalizerOrchestrator, list[PlainRow]]:
        params = data.draw(st.lists(PARAMS, min_size=1, max_size=3))
        return penalties_of(params), [PlainRow(p) for p in params]

    penalties, rows = joining()
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["count", "count", "filter", "merge"]))
        if action == "count":
            ids = data.draw(st.lists(TOKENS, min_size=len(rows), max_size=len(rows)))
            penalties.cumulate_output_tokens(torch.tensor(ids, dtype=torch.int64))
            for row, token in zip(rows, ids, strict=True):
                row.seen.append(token)
        elif action == "filter":
            keep = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
            penalties.filter(keep, torch.tensor(keep))
            rows = [rows[i] for i in keep]
        else:
            other, more = joining()
            penalties.merge(other)
            rows += more
        assert penalties.is_required == any(row.params.penalised for row in rows)
        logits = some_logits(len(rows), CONFIG.vocab_size)
        expected = plain_penalised(rows, logits)
        accumulated = logits.clone()
        penalties.accumulate().apply(accumulated)
        penalties.apply(logits)
        assert torch.equal(logits, expected)
        torch.testing.assert_close(accumulated, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(PARAMS, st.lists(TOKENS, max_size=12)), min_size=1, max_size=4))
def test_a_returning_request_keeps_its_exact_penalties(rows: list[tuple[SamplingParams, list[int]]]) -> None:
    params, outputs = zip(*rows, strict=True)
    returned = penalties_of(params, outputs, exact=True)
    forgetful = penalties_of(params, outputs)
    fresh, *others = (penalties_of([p], exact=True) for p in params)
    for alone, done in zip((fresh, *others), outputs, strict=True):
        for token in done:
            alone.cumulate_output_tokens(torch.tensor([token]))
    for alone in others:
        fresh.merge(alone)
    for penalties, seen in ((returned, outputs), (fresh, outputs), (forgetful, [[] for _ in outputs])):
        logits = some_logits(len(rows), CONFIG.vocab_size)
        plain = [PlainRow(p, list(done)) for p, done in zip(params, seen, strict=True)]
        expected = plain_penalised(plain, logits)
        penalties.apply(logits)
        assert torch.equal(logits, expected)


def test_a_copy_counts_the_same_tokens_and_keeps_its_rows() -> None:
    params = [SamplingParams(presence_penalty=1.0), SamplingParams(min_new_tokens=2)]
    live = penalties_of(params, exact=True)
    copied = live.copy()
    copied.cumulate_output_tokens(torch.tensor([4, 5]))
    live.filter([1], torch.tensor([1]))
    logits = torch.zeros((1, CONFIG.vocab_size))
    live.apply(logits)
    assert logits[0, 2] == -torch.inf and logits[0, 5] == 0
    live.cumulate_output_tokens(torch.tensor([6]))
    both = torch.zeros((2, CONFIG.vocab_size))
    copied.apply(both)
    assert both[0, 4] == -1 and both[1, 2] == -torch.inf


def test_accumulated_penalties_do_not_see_later_tokens() -> None:
    params = [SamplingParams(frequency_penalty=0.5, repetition_penalty=2.0)]
    penalties = penalties_of(params)
    before = penalties.accumulate()
    penalties.cumulate_output_tokens(torch.tensor([4]))
    logits = torch.ones((1, CONFIG.vocab_size))
    before.apply(logits)
    assert torch.equal(logits, torch.ones_like(logits))


@pytest.mark.parametrize("empty_side", ["self", "other"])
def test_merging_with_no_rows(empty_side: str) -> None:
    some = penalties_of([SamplingParams(min_new_tokens=3, presence_penalty=1.0)])
    none = penalties_of([])
    left, right = (none, some) if empty_side == "self" else (some, none)
    left.merge(right)
    logits = torch.zeros((1, CONFIG.vocab_size))
    left.apply(logits)
    assert logits[0, 7] == -torch.inf
