"""The questions that speculation asks of the relay: one small policy for each, beside those of ``Row``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ..batch import DraftInput, FutureIndices, ScheduleBatch, StepResult
from .desk import Desk
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

    rows_wait: Callable[[Desk, ScheduleBatch], None]
    prepare_lengths: Callable[[Desk, ScheduleBatch], None]
    ends: Ends
    host_lengths: Callable[[Desk, ScheduleBatch], None]
    isolated: Callable[[ScheduleBatch], AbstractContextManager[None]]
    resolve: Callable[[Desk, Step, ScheduleBatch], None]
    rotate: Callable[[Desk, ScheduleBatch, torch.Tensor, torch.Tensor], torch.Tensor]
    prompt_lens: Callable[[Desk, ScheduleBatch, Lens], Lens]
    extend_lens: Callable[[Desk, Sequence[int], Sequence[int]], Lens]
    publish: Callable[[Desk, ScheduleBatch, torch.Tensor], None]
    step_lens: Callable[[Desk, ScheduleBatch, int], Lens]
    draft_lengths: Callable[[Desk, ScheduleBatch, int], torch.Tensor]
    stash: Callable[[Desk, FutureIndices, DraftInput], None]
    conclude: Callable[[Desk, ScheduleBatch, StepResult], None]
    filter: Callable[[Desk, ScheduleBatch, torch.Tensor, int], None]
    merge: Callable[[Desk, ScheduleBatch, ScheduleBatch], None]
    seed: Seed


class DraftRelay:
    """Asks a ``DraftRow``'s policies, on the relay's desk."""

    def __init__(self, row: DraftRow, desk: Desk) -> None:
        self.ends = row.ends
        self.rows_wait = partial(row.rows_wait, desk)
        self.prepare_lengths = partial(row.prepare_lengths, desk)
        self.host_lengths = partial(row.host_lengths, desk)
        self.resolve = partial(row.resolve, desk)
        self.rotate = partial(row.rotate, desk)
        self.prompt_lens = partial(row.prompt_lens, desk)
        self.extend_lens = partial(row.extend_lens, desk)
        self.publish = partial(row.publish, desk)
        self.step_lens = partial(row.step_lens, desk)
        self.draft_lengths = partial(row.draft_lengths, desk)
        self.stash = partial(row.stash, desk)
        self.conclude = partial(row.conclude, desk)
        self.filter = partial(row.filter, desk)
        self.merge = partial(row.merge, desk)
        self.seed = partial(row.seed, desk, self)
