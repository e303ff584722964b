"""One small policy per question: what a state of the ladder consists of, and the object that asks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, Self

import torch

from ..batch import FutureIndices, ScheduleBatch, StepResult
from ..config import EngineConfig
from ..model.sampling_info import SamplingInfo
from ..model.upload import Upload
from ..observe import Observer
from .desk import Desk, Streams
from .draft_row import DraftRelay, DraftRow
from .futures import FutureMap
from .prompt import Parts

Step = Callable[[ScheduleBatch], None]
Preparation = Literal["split", "fused"]


class PenaltyTokens(Protocol):
    exact: bool  # promises the same tokens in every loop

    def before_decode(self, batch: ScheduleBatch, info: SamplingInfo) -> None:
        """Schedule stream, while a decode is prepared."""

    def before_rows_change(self, info: SamplingInfo) -> None:
        """Schedule stream, before rows of ``info`` are taken or appended."""

    def after_sampling(self, info: SamplingInfo, token_ids: torch.Tensor) -> None:
        """On the stream that sampled; ``info`` is what it sampled with."""


@dataclass(frozen=True, slots=True)
class Row:
    """The answers of one state for one loop. Each field is a question of the relay, in the order of a step."""

    futures: Callable[[EngineConfig], FutureMap]
    pages: Callable[[torch.Tensor], torch.Tensor]
    barrier: Callable[[Desk], None]
    flatten: Callable[[Desk, ScheduleBatch, Parts], torch.Tensor]
    staging: Callable[[Desk, torch.Tensor], torch.Tensor]
    stage_prompt: Callable[[Desk, ScheduleBatch, torch.Tensor], None]
    preparation: Preparation
    prepare_input: Callable[[Desk, ScheduleBatch], None]
    advance: Callable[[Desk, ScheduleBatch], None]
    penalty_tokens: Callable[[Desk], PenaltyTokens]
    sampling_tensors: Upload
    allocation_lengths: Callable[[Desk, ScheduleBatch], torch.Tensor]
    mix: Callable[[Desk, ScheduleBatch, ScheduleBatch], None]
    open: Callable[[Desk, ScheduleBatch], FutureIndices]
    host_lengths: Callable[[Desk, ScheduleBatch], None]
    host_indices: Callable[[Desk, ScheduleBatch], torch.Tensor]
    isolate: Callable[[Desk, Step, Step, ScheduleBatch], AbstractContextManager[None]]
    resolve: Callable[[Desk, ScheduleBatch], None]
    read_tables: Callable[[Desk, ScheduleBatch], None]
    publish: Callable[[Desk, ScheduleBatch], None]
    stash: Callable[[Desk, FutureIndices, torch.Tensor], None]
    keep_alive: Callable[[Desk, ScheduleBatch, StepResult], None]
    reads_done: Callable[[Desk, ScheduleBatch], None]
    conclude: Callable[[Desk, ScheduleBatch, StepResult], None]
    await_tokens: Callable[[Desk, torch.Event], None]
    filter: Callable[[Desk, ScheduleBatch, torch.Tensor], None]
    joins: Callable[[Desk, ScheduleBatch], bool]
    merge: Callable[[Desk, ScheduleBatch, ScheduleBatch], None]
    bootstrap: Callable[[Desk, ScheduleBatch], None]
    prebuild: Callable[[Desk, ScheduleBatch], None]
    before_transfer: Callable[[Desk, Any], None]
    has_left: Callable[[Desk, Any], bool]
    buffer_lengths: Callable[[Desk, ScheduleBatch], torch.Tensor]
    backup_indices: Callable[[Desk, Sequence[int]], torch.Tensor | None]


class Relay:
    """What one step hands to the next: asks the row's policies, on one desk.

    Called from the loops at the places that ``Row``'s order shows; streams are the caller's unless a policy says
    otherwise.
    """

    def __init__(self, row: Row, desk: Desk, drafts: DraftRow | None = None) -> None:
        self.desk = desk
        self.drafts = None if drafts is None else DraftRelay(drafts, desk)
        self._flatten = partial(row.flatten, desk)
        self._staging = partial(row.staging, desk)
        self._stage_prompt = partial(row.stage_prompt, desk)
        self.barrier = partial(row.barrier, desk)
        self.preparation = row.preparation
        self.prepare_input = partial(row.prepare_input, desk)
        self.advance = partial(row.advance, desk)
        self.penalty_tokens = row.penalty_tokens(desk)
        self.sampling_tensors = row.sampling_tensors
        self.allocation_lengths = partial(row.allocation_lengths, desk)
        self.mix = partial(row.mix, desk)
        self.open = partial(row.open, desk)
        self.host_lengths = partial(row.host_lengths, desk)
        self.host_indices = partial(row.host_indices, desk)
        self.resolve: Step = partial(row.resolve, desk)
        if self.drafts is not None:
            self.resolve = partial(self.drafts.resolve, self.resolve)
        self.isolate = partial(row.isolate, desk, self.resolve, partial(row.read_tables, desk))
        self.publish = partial(row.publish, desk)
        self.stash = partial(row.stash, desk)
        self.keep_alive = partial(row.keep_alive, desk)
        self.reads_done = partial(row.reads_done, desk)
        self.conclude = partial(row.conclude, desk)
        self.await_tokens = partial(row.await_tokens, desk)
        self.filter = partial(row.filter, desk)
        self.joins = partial(row.joins, desk)
        self.merge = partial(row.merge, desk)
        self.bootstrap = partial(row.bootstrap, desk)
        self.prebuild = partial(row.prebuild, desk)
        self.before_transfer = partial(row.before_transfer, desk)
        self.has_left = partial(row.has_left, desk)
        self.buffer_lengths = partial(row.buffer_lengths, desk)
        self.backup_indices = partial(row.backup_indices, desk)

    @classmethod
    def of(
        cls,
        row: Row,
        config: EngineConfig,
        *,
        streams: Streams,
        observer: Observer,
        req_to_token: torch.Tensor,
        drafts: DraftRow | None = None,
    ) -> Self:
        """The relay of a run, with its buffers made on the current stream; ``drafts`` where it speculates."""
        pages = row.pages(req_to_token)
        desk = Desk(config, streams, row.futures(config), observer, req_to_token, pages)
        if drafts is not None:
            desk.isolated = drafts.isolated
        return cls(row, desk, drafts)

    def stage_prompt(self, batch: ScheduleBatch, parts: Parts) -> None:
        """The prompts' tokens, flat, on their way to the device."""
        self._stage_prompt(batch, self._staging(self._flatten(batch, parts)))
