"""The penalizers of one batch.

A penalizer exists only while a request of the batch needs it. Only the upload of parameters waits for the device, and
only if ``how`` is "pageable".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch

from ..config import EngineConfig, SamplingParams
from ..kernels.sampling import scale_repeated
from ..request import Request
from .penalties import RULES, Penalizer, PenaltyInputs, PenaltyRule
from .upload import Upload, upload


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
        made._prepare(
            made._needed(), [PenaltyInputs(req.sampling, req.output_ids if exact else ()) for req in requests]
        )
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
        for penalizer in self._subtracting():
            penalizer.apply(logits)
        for penalizer in self._scaling():
            penalizer.apply(logits)

    def accumulate(self) -> AccumulatedPenalties:
        """The current penalties, in tensors that later tokens do not change."""
        additive = self._accumulated(torch.zeros, self._subtracting())
        return AccumulatedPenalties(additive, self._accumulated(torch.ones, self._scaling()))

    def _accumulated(
        self, start: Callable[..., torch.Tensor], penalizers: Iterable[Penalizer]
    ) -> torch.Tensor | None:
        target: torch.Tensor | None = None
        for penalizer in penalizers:
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
            side._prepare(missing, [PenaltyInputs(params, ()) for params in side.params])
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

    def _prepare(self, rules: set[PenaltyRule], rows: Sequence[PenaltyInputs]) -> None:
        hosts = {rule: rule.host(rows, self.config) for rule in RULES if rule in rules}
        arrays = [array for host in hosts.values() for array in host]
        tensors = iter(upload(arrays, device=self.config.device, how=self.how))
        made = {rule: rule.build([next(tensors) for _ in host], self.config) for rule, host in hosts.items()}
        known = self.penalizers | made
        self.penalizers = {rule: known[rule] for rule in RULES if rule in known}

    def _subtracting(self) -> list[Penalizer]:
        return [penalizer for penalizer in self.penalizers.values() if not penalizer.scales]

    def _scaling(self) -> list[Penalizer]:
        return [penalizer for penalizer in self.penalizers.values() if penalizer.scales]
