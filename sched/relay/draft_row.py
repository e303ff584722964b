"""The questions that speculation asks of the relay: one small policy for each, beside those of ``row``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Literal, Self

import torch

from ..batch import DraftInput, DraftState, ExtendLens, FutureIndices, ScheduleBatch, StepResult
from .context import Context, RelayContext, Step, bind

Speculation = Literal["v1", "v2"]
# How lengths for slots ahead of time get to the device: a blocking copy each, for every use; one asynchronous copy
# each; all of them in one pinned copy, for one kernel.
Ends = Literal["blocking", "asynchronous", "packed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftPolicies(Generic[*Context]):
    """The questions in the order of a step, as in ``RelayPolicies``."""

    rows_wait: Callable[[*Context, ScheduleBatch], None]
    prepare_lengths: Callable[[*Context, ScheduleBatch], None]
    host_lengths: Callable[[*Context, ScheduleBatch], None]
    resolve: Callable[[*Context, Step, ScheduleBatch], None]
    rotate: Callable[[*Context, ScheduleBatch, torch.Tensor, torch.Tensor], torch.Tensor]
    prompt_lens: Callable[[*Context, ScheduleBatch, ExtendLens], ExtendLens]
    extend_lens: Callable[[*Context, Sequence[int], Sequence[int]], ExtendLens]
    publish: Callable[[*Context, ScheduleBatch, torch.Tensor], None]
    step_lens: Callable[[*Context, ScheduleBatch, int], ExtendLens]
    draft_lengths: Callable[[*Context, ScheduleBatch, int], torch.Tensor]
    stash: Callable[[*Context, FutureIndices, DraftInput], None]
    conclude: Callable[[*Context, ScheduleBatch, StepResult], None]
    filter: Callable[[*Context, ScheduleBatch, torch.Tensor, int], None]
    merge: Callable[[*Context, ScheduleBatch, ScheduleBatch], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRelay(DraftPolicies[()]):
    """The policies of a ``DraftRow``, bound to one run's context."""

    row: DraftRow
    context: RelayContext

    @classmethod
    def of(cls, row: DraftRow, context: RelayContext) -> Self:
        return cls(row=row, context=context, **bind(DraftPolicies, row, context))

    def seed(self, batch: ScheduleBatch, state: DraftState) -> None:
        """Give a prebuilt batch what its drafts start from: the prefill worker's last extend."""
        self.row.seed(self.context, self, batch, state)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRow(DraftPolicies[RelayContext]):
    """The answers of one state for one worker."""

    ends: Ends
    isolated: Callable[[ScheduleBatch], AbstractContextManager[None]]
    seed: Callable[[RelayContext, DraftRelay, ScheduleBatch, DraftState], None]
