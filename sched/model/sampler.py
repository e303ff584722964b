"""Samples the next tokens from a forward's logits."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..batch import ModelOutput
from ..kernels.sampling import (
    Draw,
    sample,
    sample_greedy,
    sample_greedy_tagged,
    sample_tagged,
    score_tokens,
)
from .sampling_info import SamplingInfo


class TokenScores(NamedTuple):
    """[b] float32 each; see ``kernels.sampling.score_tokens``."""

    logprobs: torch.Tensor
    margins: torch.Tensor


class TokenSampler(Protocol):
    def sample(self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor) -> torch.Tensor:
        """Next token ids [b] int64; seq_lens [b] is the position that each token will take."""

    def score(
        self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor, ids: torch.Tensor
    ) -> TokenScores:
        """Scores of the ids that ``sample`` has just returned for the same arguments."""


class Sampler:
    """Applies penalties and the vocabulary mask, and samples by one kernel. With a fingerprint kernels of the same cost
    are used that read no logits."""

    def sample(self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor) -> torch.Tensor:
        """As ``TokenSampler.sample``. Penalties change ``output.logits`` in place."""
        info.apply_penalties(output.logits)
        greedy = info.needs.greedy
        rows = (output.logits, info.vocab_mask) if greedy else _draw(output, info, seq_lens)
        if output.fingerprint is None:
            ids: torch.Tensor = (sample_greedy if greedy else sample)(*rows)
        else:
            ids = (sample_greedy_tagged if greedy else sample_tagged)(*rows, output.fingerprint)
        return ids

    def score(
        self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor, ids: torch.Tensor
    ) -> TokenScores:
        """Scores of the ``ids`` that ``sample`` has returned for the same arguments, by one more launch."""
        return TokenScores(*score_tokens(*_draw(output, info, seq_lens), ids))


def _draw(output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor) -> Draw:
    temperatures, top_ps, top_ks, min_ps, seeds = info.tensors
    limits = (temperatures, top_ks, top_ps, min_ps)
    return Draw(output.logits, *limits, seeds, seq_lens, info.vocab_mask, info.needs.filters)
