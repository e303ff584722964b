"""One small policy per question: what a state of the ladder consists of, and the object that asks them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..batch import ScheduleBatch, StepResult
from ..model.sampling_info import SamplingInfo
from ..model.upload import Upload
from .desk import Desk
from .prompt import Parts


class PenaltyTokens(Protocol):
    exact: bool  # promises the same tokens in every loop

    def before_decode(self, batch: ScheduleBatch, info: SamplingInfo) -> None:
        """Schedule stream, while a decode is prepared."""

    def after_sampling(self, info: SamplingInfo, token_ids: torch.Tensor) -> None:
        """On the stream that sampled; ``info`` is what it sampled with."""


@dataclass(frozen=True, slots=True)
class Row:
    """The answers of one state for one loop. Each field is a question of the relay, in the order of a step."""

    barrier: Callable[[Desk], None]
    stage_prompt: Callable[[Desk, ScheduleBatch, Parts], None]
    prepare_input: Callable[[Desk, ScheduleBatch], None]
    advance: Callable[[Desk, ScheduleBatch], None]
    penalty_tokens: Callable[[Desk], PenaltyTokens]
    sampling_tensors: Upload
    allocation_lengths: Callable[[Desk, ScheduleBatch], torch.Tensor]
    mix: Callable[[Desk, ScheduleBatch, ScheduleBatch], None]
    open: Callable[[Desk, ScheduleBatch], None]
    host_lengths: Callable[[Desk, ScheduleBatch], None]
    host_indices: Callable[[Desk, ScheduleBatch], torch.Tensor]
    isolate: Callable[[Desk, Callable[[ScheduleBatch], None], ScheduleBatch], AbstractContextManager[None]]
    resolve: Callable[[Desk, ScheduleBatch], None]
    publish: Callable[[Desk, ScheduleBatch], None]
    stash: Callable[[Desk, torch.Tensor, torch.Tensor], None]
    keep_alive: Callable[[Desk, ScheduleBatch, StepResult], None]
    reads_done: Callable[[Desk, ScheduleBatch], None]
    conclude: Callable[[Desk, ScheduleBatch, StepResult], None]
    filter: Callable[[Desk, ScheduleBatch, torch.Tensor], None]
    merge: Callable[[Desk, ScheduleBatch, ScheduleBatch], None]


class Relay:
    """What one step hands to the next: asks the row's policies, on one desk.

    Called from the loops at the places that ``Row``'s order shows; streams are the caller's unless a policy says
    otherwise.
    """

    def __init__(self, row: Row, desk: Desk) -> None:
        self.desk = desk
        self.barrier = partial(row.barrier, desk)
        self.stage_prompt = partial(row.stage_prompt, desk)
        self.prepare_input = partial(row.prepare_input, desk)
        self.advance = partial(row.advance, desk)
        self.penalty_tokens = row.penalty_tokens(desk)
        self.sampling_tensors = row.sampling_tensors
        self.allocation_lengths = partial(row.allocation_lengths, desk)
        self.mix = partial(row.mix, desk)
        self.open = partial(row.open, desk)
        self.host_lengths = partial(row.host_lengths, desk)
        self.host_indices = partial(row.host_indices, desk)
        self.resolve = partial(row.resolve, desk)
        self.isolate = partial(row.isolate, desk, self.resolve)
        self.publish = partial(row.publish, desk)
        self.stash = partial(row.stash, desk)
        self.keep_alive = partial(row.keep_alive, desk)
        self.reads_done = partial(row.reads_done, desk)
        self.conclude = partial(row.conclude, desk)
        self.filter = partial(row.filter, desk)
        self.merge = partial(row.merge, desk)
