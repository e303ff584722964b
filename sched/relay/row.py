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
from .context import RelayContext, Streams
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
class RelayRow:
    """The answers of one state for one loop. Each field is a question of the relay, in the order of a step."""

    futures: Callable[[EngineConfig], FutureMap]
    pages: Callable[[torch.Tensor], torch.Tensor]
    barrier: Callable[[RelayContext], None]
    flatten: Callable[[RelayContext, ScheduleBatch, Parts], torch.Tensor]
    staging: Callable[[RelayContext, torch.Tensor], torch.Tensor]
    stage_prompt: Callable[[RelayContext, ScheduleBatch, torch.Tensor], None]
    preparation: Preparation
    prepare_input: Callable[[RelayContext, ScheduleBatch], None]
    advance: Callable[[RelayContext, ScheduleBatch], None]
    penalty_tokens: Callable[[RelayContext], PenaltyTokens]
    sampling_tensors: Upload
    allocation_lengths: Callable[[RelayContext, ScheduleBatch], torch.Tensor]
    mix: Callable[[RelayContext, ScheduleBatch, ScheduleBatch], None]
    open: Callable[[RelayContext, ScheduleBatch], FutureIndices]
    host_lengths: Callable[[RelayContext, ScheduleBatch], None]
    host_indices: Callable[[RelayContext, ScheduleBatch], torch.Tensor]
    isolate: Callable[[RelayContext, Step, Step, ScheduleBatch], AbstractContextManager[None]]
    resolve: Callable[[RelayContext, ScheduleBatch], None]
    read_tables: Callable[[RelayContext, ScheduleBatch], None]
    publish: Callable[[RelayContext, ScheduleBatch], None]
    stash: Callable[[RelayContext, FutureIndices, torch.Tensor], None]
    keep_alive: Callable[[RelayContext, ScheduleBatch, StepResult], None]
    reads_done: Callable[[RelayContext, ScheduleBatch], None]
    conclude: Callable[[RelayContext, ScheduleBatch, StepResult], None]
    await_tokens: Callable[[RelayContext, torch.Event], None]
    filter: Callable[[RelayContext, ScheduleBatch, torch.Tensor], None]
    joins: Callable[[RelayContext, ScheduleBatch], bool]
    merge: Callable[[RelayContext, ScheduleBatch, ScheduleBatch], None]
    bootstrap: Callable[[RelayContext, ScheduleBatch], None]
    prebuild: Callable[[RelayContext, ScheduleBatch], None]
    before_transfer: Callable[[RelayContext, Any], None]
    has_left: Callable[[RelayContext, Any], bool]
    buffer_lengths: Callable[[RelayContext, ScheduleBatch], torch.Tensor]
    backup_indices: Callable[[RelayContext, Sequence[int]], torch.Tensor | None]


class Relay:
    """What one step hands to the next: asks the row's policies, on one context.

    Called from the loops at the places that ``RelayRow``'s order shows; streams are the caller's unless a policy says
    otherwise.
    """

    def __init__(self, row: RelayRow, context: RelayContext, drafts: DraftRow | None = None) -> None:
        self.context = context
        self.drafts = None if drafts is None else DraftRelay(drafts, context)
        self._flatten = partial(row.flatten, context)
        self._staging = partial(row.staging, context)
        self._stage_prompt = partial(row.stage_prompt, context)
        self.barrier = partial(row.barrier, context)
        self.preparation = row.preparation
        self.prepare_input = partial(row.prepare_input, context)
        self.advance = partial(row.advance, context)
        self.penalty_tokens = row.penalty_tokens(context)
        self.sampling_tensors = row.sampling_tensors
        self.allocation_lengths = partial(row.allocation_lengths, context)
        self.mix = partial(row.mix, context)
        self.open = partial(row.open, context)
        self.host_lengths = partial(row.host_lengths, context)
        self.host_indices = partial(row.host_indices, context)
        self.resolve: Step = partial(row.resolve, context)
        if self.drafts is not None:
            self.resolve = partial(self.drafts.resolve, self.resolve)
        self.isolate = partial(row.isolate, context, self.resolve, partial(row.read_tables, context))
        self.publish = partial(row.publish, context)
        self.stash = partial(row.stash, context)
        self.keep_alive = partial(row.keep_alive, context)
        self.reads_done = partial(row.reads_done, context)
        self.conclude = partial(row.conclude, context)
        self.await_tokens = partial(row.await_tokens, context)
        self.filter = partial(row.filter, context)
        self.joins = partial(row.joins, context)
        self.merge = partial(row.merge, context)
        self.bootstrap = partial(row.bootstrap, context)
        self.prebuild = partial(row.prebuild, context)
        self.before_transfer = partial(row.before_transfer, context)
        self.has_left = partial(row.has_left, context)
        self.buffer_lengths = partial(row.buffer_lengths, context)
        self.backup_indices = partial(row.backup_indices, context)

    @classmethod
    def of(
        cls,
        row: RelayRow,
        config: EngineConfig,
        *,
        streams: Streams,
        observer: Observer,
        req_to_token: torch.Tensor,
        drafts: DraftRow | None = None,
    ) -> Self:
        """The relay of a run, with its buffers made on the current stream; ``drafts`` where it speculates."""
        pages = row.pages(req_to_token)
        context = RelayContext(config, streams, row.futures(config), observer, req_to_token, pages)
        if drafts is not None:
            context.isolated = drafts.isolated
        return cls(row, context, drafts)

    def stage_prompt(self, batch: ScheduleBatch, parts: Parts) -> None:
        """The prompts' tokens, flat, on their way to the device."""
        self._stage_prompt(batch, self._staging(self._flatten(batch, parts)))
