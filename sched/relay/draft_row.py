"""The questions that speculation asks of the relay: one small policy for each, beside those of ``Row``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ..batch import DraftInput, FutureIndices, ScheduleBatch, StepResult
from .context import RelayContext
from .draft_prebuilt import Seed

Speculation = Literal["v1", "v2"]
Step = Callable[[ScheduleBatch], None]
Lens = tuple[torch.Tensor, torch.Tensor]  # new tokens of each request and tokens before, [b] int32
# How lengths for slots ahead of time get to the device: a blocking copy each, for every use; one asynchronous copy
# each; all of them in one pinned copy, for one kernel.
Ends = Literal["blocking", "asynchronous", "packed"]


@dataclass(frozen=True, slots=True)
class DraftRow:
    """The answers of one state for one worker. Each field is a question, in the order of a step."""

    rows_wait: Callable[[RelayContext, ScheduleBatch], None]
    prepare_lengths: Callable[[RelayContext, ScheduleBatch], None]
    ends: Ends
    host_lengths: Callable[[RelayContext, ScheduleBatch], None]
    isolated: Callable[[ScheduleBatch], AbstractContextManager[None]]
    resolve: Callable[[RelayContext, Step, ScheduleBatch], None]
    rotate: Callable[[RelayContext, ScheduleBatch, torch.Tensor, torch.Tensor], torch.Tensor]
    prompt_lens: Callable[[RelayContext, ScheduleBatch, Lens], Lens]
    extend_lens: Callable[[RelayContext, Sequence[int], Sequence[int]], Lens]
    publish: Callable[[RelayContext, ScheduleBatch, torch.Tensor], None]
    step_lens: Callable[[RelayContext, ScheduleBatch, int], Lens]
    draft_lengths: Callable[[RelayContext, ScheduleBatch, int], torch.Tensor]
    stash: Callable[[RelayContext, FutureIndices, DraftInput], None]
    conclude: Callable[[RelayContext, ScheduleBatch, StepResult], None]
    filter: Callable[[RelayContext, ScheduleBatch, torch.Tensor, int], None]
    merge: Callable[[RelayContext, ScheduleBatch, ScheduleBatch], None]
    seed: Seed


class DraftRelay:
    """Asks a ``DraftRow``'s policies, on the relay's context."""

    def __init__(self, row: DraftRow, context: RelayContext) -> None:
        self.ends = row.ends
        self.rows_wait = partial(row.rows_wait, context)
        self.prepare_lengths = partial(row.prepare_lengths, context)
        self.host_lengths = partial(row.host_lengths, context)
        self.resolve = partial(row.resolve, context)
        self.rotate = partial(row.rotate, context)
        self.prompt_lens = partial(row.prompt_lens, context)
        self.extend_lens = partial(row.extend_lens, context)
        self.publish = partial(row.publish, context)
        self.step_lens = partial(row.step_lens, context)
        self.draft_lengths = partial(row.draft_lengths, context)
        self.stash = partial(row.stash, context)
        self.conclude = partial(row.conclude, context)
        self.filter = partial(row.filter, context)
        self.merge = partial(row.merge, context)
        self.seed = partial(row.seed, context, self)
