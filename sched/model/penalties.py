"""Frequency, presence and repetition penalties and min_new_tokens, as state on the device.

Each penalizer holds one row of [vocab] float32 per request and counts token ids that the caller passes on the device. A
rule builds the penalizer from host arrays, which the caller uploads. A batch has a penalizer only while a request of it
needs one. Only the upload of parameters waits for the device, and only if ``how`` is "pageable".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from ..config import EngineConfig, SamplingParams
from ..kernels.sampling import scale_repeated, withhold_stops
from ..kernels.verify import along_paths, count_accepted
from ..request import Request
from .upload import Upload, upload

Arrays = list[np.ndarray[Any, Any]]
Outputs = Sequence[Sequence[int]]
"""The tokens that count so far, of each row."""


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How one parameter of a request and its tokens determine a row."""

    parameter: str
    neutral: float
    adds: bool = False  # repetitions of a token count
    scales: bool = False

    def needed(self, params: SamplingParams) -> bool:
        return bool(getattr(params, self.parameter) != self.neutral)

    def host(self, rows: Sequence[SamplingParams], outputs: Outputs, config: EngineConfig) -> Arrays:
        """The host arrays: parameters, and the state after ``outputs`` if there are any."""
        values = np.array([[getattr(params, self.parameter)] for params in rows], np.float32)
        past = [
            (index * config.vocab_size + token, self._after(values[index, 0], count))
            for index, (params, output_ids) in enumerate(zip(rows, outputs, strict=True))
            if self.needed(params)
            for token, count in Counter(output_ids).items()
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

    def host(self, rows: Sequence[SamplingParams], outputs: Outputs, config: EngineConfig) -> Arrays:
        least = np.array([[params.min_new_tokens] for params in rows], np.int32)
        stops = [{*params.stop_token_ids, *config.eos_token_ids} for params in rows]
        padded = np.full((len(rows), max(map(len, stops))), config.vocab_size, np.int64)
        for line, ids in zip(padded, stops, strict=True):
            line[: len(ids)] = sorted(ids)
        lens = np.array([[len(output_ids)] for output_ids in outputs], np.int32)
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
# In upstream's order; the scaling penalty acts after all subtractions.
RULES: tuple[PenaltyRule, ...] = (
    TokenRule("frequency_penalty", 0.0, adds=True),
    MinNewTokens(),
    TokenRule("presence_penalty", 0.0),
    TokenRule("repetition_penalty", 1.0, scales=True),
)


class AccumulatedPenalties(NamedTuple):
    """A forward's own copy of the penalties, [b, vocab] float32 each."""

    additive: torch.Tensor | None = None
    scaling: torch.Tensor | None = None

    def apply(self, logits: torch.Tensor) -> None:
        if self.additive is not None:
            logits.add_(self.additive)
        if self.scaling is not None:
            scale_repeated(logits, self.scaling)

    def repeated(self, each: int) -> AccumulatedPenalties:
        """The same penalties for ``each`` independent drafts of a request: [b · each, vocab]."""
        return AccumulatedPenalties(
            *(part if part is None else part.repeat_interleave(each, 0) for part in self)
        )


@dataclass(slots=True)
class PenalizerOrchestrator:
    """The penalizers of one batch, in the order of ``RULES``.

    With ``exact`` a new row counts the tokens that its request already has, so that penalties continue after a
    retraction; upstream's start from zero.
    """

    config: EngineConfig
    params: tuple[SamplingParams, ...]
    how: Upload = "pageable"
    exact: bool = False
    penalizers: dict[PenaltyRule, Penalizer] = field(default_factory=dict)

    @classmethod
    def from_requests(
        cls,
        requests: Sequence[Request],
        *,
        config: EngineConfig,
        how: Upload = "pageable",
        exact: bool = False,
    ) -> Self:
        made = cls(config, tuple(req.sampling for req in requests), how, exact)
        made._prepare(made._needed(), [req.output_ids if exact else () for req in requests])
        return made

    @property
    def is_required(self) -> bool:
        return bool(self.penalizers)

    def cumulate_output_tokens(self, ids: torch.Tensor) -> None:
        """Count token ids [b] int64, one per row of the batch."""
        for penalizer in self.penalizers.values():
            penalizer.cumulate(ids)

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise logits [b, vocab] in place."""
        for penalizer in self.penalizers.values():
            penalizer.apply(logits)

    def accumulate(self) -> AccumulatedPenalties:
        """The current penalties, in tensors that later tokens do not change."""
        additive = self._accumulated(torch.zeros, scales=False)
        return AccumulatedPenalties(additive, self._accumulated(torch.ones, scales=True))

    def _accumulated(self, start: Callable[..., torch.Tensor], *, scales: bool) -> torch.Tensor | None:
        target: torch.Tensor | None = None
        for penalizer in [each for each in self.penalizers.values() if each.scales is scales]:
            if target is None:
                shape = (len(self.params), self.config.vocab_size)
                target = start(shape, dtype=torch.float32, device=self.config.device)
            penalizer.accumulate(target)
        return target

    def filter(self, keep: Sequence[int], keep_device: torch.Tensor) -> None:
        self.params = tuple(self.params[i] for i in keep)
        needed = self._needed()
        self.penalizers = {rule: p for rule, p in self.penalizers.items() if rule in needed}
        for penalizer in self.penalizers.values():
            penalizer.filter(keep_device)

    def merge(self, other: Self) -> None:
        """Append the other's rows. A side without a penalizer that the other has builds it with neutral rows, which
        needs uploads."""
        if not (self.params and other.params):
            self.penalizers = self.penalizers or other.penalizers
            self.params += other.params
            return
        needed = {*self.penalizers, *other.penalizers}
        for side in (self, other):
            missing = needed - set(side.penalizers)
            side._prepare(missing, [()] * len(side.params))
        for rule, penalizer in self.penalizers.items():
            penalizer.merge(other.penalizers[rule])
        self.params += other.params

    def copy(self) -> Self:
        """New penalizers on the same tensors: counted tokens change both, filter and merge only one."""
        penalizers = {rule: copy(penalizer) for rule, penalizer in self.penalizers.items()}
        return type(self)(self.config, self.params, self.how, self.exact, penalizers)

    def along(self, paths: torch.Tensor) -> Self:
        """Penalizers for several drafts per request, each with its own history: see ``Penalizer.along``."""
        each = paths.shape[0] // len(self.params)
        params = tuple(one for one in self.params for _ in range(each))
        penalizers = {rule: penalizer.along(paths) for rule, penalizer in self.penalizers.items()}
        return type(self)(self.config, params, self.how, self.exact, penalizers)

    def count_accepted(self, accepted: torch.Tensor) -> None:
        """Count several tokens per request: see ``Penalizer.count``."""
        for penalizer in self.penalizers.values():
            penalizer.count(accepted)

    def _needed(self) -> set[PenaltyRule]:
        return {rule for rule in RULES if any(map(rule.needed, self.params))}

    def _prepare(self, rules: set[PenaltyRule], outputs: Outputs) -> None:
        hosts = {rule: rule.host(self.params, outputs, self.config) for rule in RULES if rule in rules}
        arrays = [array for host in hosts.values() for array in host]
        tensors = iter(upload(arrays, device=self.config.device, how=self.how))
        made = {rule: rule.build([next(tensors) for _ in host], self.config) for rule, host in hosts.items()}
        known = self.penalizers | made
        self.penalizers = {rule: known[rule] for rule in RULES if rule in known}
