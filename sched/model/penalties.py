"""Frequency, presence and repetition penalties and min_new_tokens, as state on the device.

Each penalizer holds one row of [vocab] float32 per request and counts token ids that the caller passes on the device. A
rule builds the penalizer from host arrays, which the caller uploads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..config import EngineConfig, SamplingParams
from ..kernels.history import along_paths, count_accepted
from ..kernels.sampling import scale_repeated, withhold_stops

Arrays = list[np.ndarray[Any, Any]]


class PenaltyInputs(NamedTuple):
    """The inputs of one row of a penalizer: a request's parameters and the tokens that count so far."""

    params: SamplingParams
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How one parameter of a request and its tokens determine a row."""

    parameter: str
    neutral: float
    adds: bool = False  # repetitions of a token count
    scales: bool = False

    def needed(self, params: SamplingParams) -> bool:
        return bool(getattr(params, self.parameter) != self.neutral)

    def host(self, rows: Sequence[PenaltyInputs], config: EngineConfig) -> Arrays:
        """The host arrays: parameters, and the state after ``output_ids`` if there are any."""
        values = np.array([[getattr(row.params, self.parameter)] for row in rows], np.float32)
        past = [
            (index * config.vocab_size + token, self._after(values[index, 0], count))
            for index, row in enumerate(rows)
            if self.needed(row.params)
            for token, count in Counter(row.output_ids).items()
        ]
        if not past:
            return [values]
        places, weights = zip(*past, strict=True)
        return [values, np.array(places, np.int64), np.array(weights, np.float32)]

    def _after(self, value: np.float32, count: int) -> np.float32:
        """The state after ``count`` occurrences, rounded like the device's successive additions."""
        return np.cumsum(np.full(count, value), dtype=np.float32)[-1] if self.adds else value

    def build(self, tensors: Sequence[torch.Tensor], config: EngineConfig) -> TokenPenalizer:
        """The penalizer from the uploaded ``host`` arrays."""
        values, *past = tensors
        shape = (values.shape[0], config.vocab_size)
        state = torch.full(shape, self.neutral, dtype=torch.float32, device=values.device)
        if past:
            state.view(-1).index_copy_(0, *past)
        return TokenPenalizer(self, values, state)


FREQUENCY = TokenRule("frequency_penalty", 0.0, adds=True)
PRESENCE = TokenRule("presence_penalty", 0.0)
REPETITION = TokenRule("repetition_penalty", 1.0, scales=True)


@dataclass(slots=True)
class TokenPenalizer:
    """Rows follow the batch. ``filter`` and ``merge`` replace tensors and leave the old ones as they were."""

    rule: TokenRule
    values: torch.Tensor  # [b, 1] float32
    state: torch.Tensor  # [b, vocab] float32

    @property
    def scales(self) -> bool:
        """Whether it acts on logits by ``scale_repeated``; otherwise it subtracts."""
        return self.rule.scales

    def cumulate(self, ids: torch.Tensor) -> None:
        """Count ids[i] in row i."""
        if self.rule.adds:
            self.state.scatter_add_(1, ids.unsqueeze(1), self.values)
        else:
            self.state.scatter_(1, ids.unsqueeze(1), self.values)

    def apply(self, logits: torch.Tensor) -> None:
        if self.scales:
            scale_repeated(logits, self.state)
        else:
            logits.sub_(self.state)

    def accumulate(self, target: torch.Tensor) -> None:
        """Accumulate this penalty in ``target`` [b, vocab], which starts as zeros for sums and as ones for factors."""
        if self.scales:
            target.mul_(self.state)
        else:
            target.sub_(self.state)

    def filter(self, keep: torch.Tensor) -> None:
        self.values = self.values.index_select(0, keep)
        self.state = self.state.index_select(0, keep)

    def merge(self, other: Any) -> None:
        self.values = torch.cat((self.values, other.values))
        self.state = torch.cat((self.state, other.state))

    def along(self, paths: torch.Tensor) -> TokenPenalizer:
        """This penalizer with a row for each of several drafts per request, whose own history is ``paths`` [b · d,
        depth] int64, -1 behind the last token."""
        each = paths.shape[0] // self.state.shape[0]
        state = along_paths(self.state, self.values, paths, self.rule.adds)
        return TokenPenalizer(self.rule, self.values.repeat_interleave(each, 0), state)

    def count(self, accepted: torch.Tensor) -> None:
        """Count several tokens per request: ``accepted`` [b, n] int64, -1 behind the last."""
        count_accepted(self.state, self.values, accepted, self.rule.adds)


@dataclass(frozen=True, slots=True)
class MinNewTokens:
    """The rule of ``min_new_tokens``: no stop token before that many outputs."""

    def needed(self, params: SamplingParams) -> bool:
        return params.min_new_tokens > 0

    def host(self, rows: Sequence[PenaltyInputs], config: EngineConfig) -> Arrays:
        least = np.array([[row.params.min_new_tokens] for row in rows], np.int32)
        stops = [{*row.params.stop_token_ids, *config.eos_token_ids} for row in rows]
        padded = np.full((len(rows), max(map(len, stops))), config.vocab_size, np.int64)
        for line, ids in zip(padded, stops, strict=True):
            line[: len(ids)] = sorted(ids)
        lens = np.array([[len(row.output_ids)] for row in rows], np.int32)
        return [least, padded, lens] if lens.any() else [least, padded]

    def build(self, tensors: Sequence[torch.Tensor], config: EngineConfig) -> StopPenalizer:
        least, padded, *lens = tensors
        # One column more than the vocabulary, for the padding of the id lists.
        wide = torch.zeros((least.shape[0], config.vocab_size + 1), dtype=torch.float32, device=least.device)
        stops = wide.scatter_(1, padded, torch.inf)[:, : config.vocab_size]
        return StopPenalizer(least, stops, lens[0] if lens else torch.zeros_like(least))


@dataclass(slots=True)
class StopPenalizer:
    """The same methods for ``MinNewTokens``."""

    min_new_tokens: torch.Tensor  # [b, 1] int32
    stops: torch.Tensor  # [b, vocab] float32, inf at stop tokens
    output_lens: torch.Tensor  # [b, 1] int32
    scales: bool = False

    def cumulate(self, ids: torch.Tensor) -> None:  # noqa: ARG002
        self.output_lens.add_(1)

    def apply(self, logits: torch.Tensor) -> None:
        withhold_stops(logits, self.stops, self.output_lens, self.min_new_tokens)

    accumulate = apply

    def filter(self, keep: torch.Tensor) -> None:
        self.min_new_tokens = self.min_new_tokens.index_select(0, keep)
        self.stops = self.stops.index_select(0, keep)
        self.output_lens = self.output_lens.index_select(0, keep)

    def merge(self, other: Any) -> None:
        self.min_new_tokens = torch.cat((self.min_new_tokens, other.min_new_tokens))
        self.stops = torch.cat((self.stops, other.stops))
        self.output_lens = torch.cat((self.output_lens, other.output_lens))

    def along(self, paths: torch.Tensor) -> StopPenalizer:
        each = paths.shape[0] // self.stops.shape[0]
        least, stops, lens = (
            rows.repeat_interleave(each, 0) for rows in (self.min_new_tokens, self.stops, self.output_lens)
        )
        return StopPenalizer(least, stops, lens + _tokens_in(paths))

    def count(self, accepted: torch.Tensor) -> None:
        self.output_lens.add_(_tokens_in(accepted))


def _tokens_in(rows: torch.Tensor) -> torch.Tensor:
    """The number of tokens in each row, [n, 1] int32."""
    return (rows >= 0).sum(1, keepdim=True).to(torch.int32)


PenaltyRule = TokenRule | MinNewTokens
Penalizer = TokenPenalizer | StopPenalizer
# In upstream's order; scaling penalties act after all subtractions.
RULES: tuple[PenaltyRule, ...] = (FREQUENCY, MinNewTokens(), PRESENCE, REPETITION)
