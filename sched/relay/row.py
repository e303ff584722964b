"""One small policy per question: what a state of the ladder consists of, and the object that asks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Self

import torch

from ..batch import DraftInput, DraftState, ExtendLens, FutureIndices, ScheduleBatch, StepResult
from ..config import EngineConfig
from ..model.upload import Upload
from ..observe import Observer
from ..streams import Streams
from .context import Context, FutureMap, RelayContext, Step, bind
from .penalties import PenaltyTokens
from .tokens import Parts

Speculation = Literal["v1", "v2"]
# How lengths for slots ahead of time get to the device: a blocking copy each, for every use; one asynchronous copy
# each; all of them in one pinned copy, for one kernel.
Ends = Literal["blocking", "asynchronous", "packed"]
Preparation = Literal["split", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RelayPolicies(Generic[*Context]):
    """The questions that the loops ask in every step. Each field is a question, and its type is the policy's signature
    behind ``*Context``: a RelayContext in a row, nothing in a relay, whose policies are bound to one."""

    barrier: Callable[[*Context], None]
    prepare_input: Callable[[*Context, ScheduleBatch], None]
    advance: Callable[[*Context, ScheduleBatch], None]
    allocation_lengths: Callable[[*Context, ScheduleBatch], torch.Tensor]
    mix: Callable[[*Context, ScheduleBatch, ScheduleBatch], None]
    open: Callable[[*Context, ScheduleBatch], FutureIndices]
    host_lengths: Callable[[*Context, ScheduleBatch], None]
    host_indices: Callable[[*Context, ScheduleBatch], torch.Tensor]
    resolve: Callable[[*Context, ScheduleBatch], None]
    resolve_prompt: Callable[[*Context, ScheduleBatch], None]
    read_tables: Callable[[*Context, ScheduleBatch], None]
    publish: Callable[[*Context, ScheduleBatch], None]
    stash: Callable[[*Context, FutureIndices, torch.Tensor], None]
    keep_alive: Callable[[*Context, ScheduleBatch, StepResult], None]
    reads_done: Callable[[*Context, ScheduleBatch], None]
    conclude: Callable[[*Context, ScheduleBatch, StepResult], None]
    conclude_blocks: Callable[[*Context, ScheduleBatch, StepResult], None]
    await_tokens: Callable[[*Context, torch.Event], None]
    filter: Callable[[*Context, ScheduleBatch, torch.Tensor], None]
    joins: Callable[[*Context, ScheduleBatch], bool]
    merge: Callable[[*Context, ScheduleBatch, ScheduleBatch], None]
    bootstrap: Callable[[*Context, ScheduleBatch], None]
    prebuild: Callable[[*Context, ScheduleBatch], None]
    before_transfer: Callable[[*Context, Any], None]
    has_left: Callable[[*Context, Any], bool]
    buffer_lengths: Callable[[*Context, ScheduleBatch], torch.Tensor]
    backup_indices: Callable[[*Context, Sequence[int]], torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RelayRow(RelayPolicies[RelayContext]):
    """The answers of one state for one loop: to the questions of every step, and to those that ``Relay`` puts together
    itself."""

    futures: Callable[[EngineConfig], FutureMap]
    pages: Callable[[torch.Tensor], torch.Tensor]
    flatten: Callable[[RelayContext, ScheduleBatch, Parts], torch.Tensor]
    staging: Callable[[RelayContext, torch.Tensor], torch.Tensor]
    stage_prompt: Callable[[RelayContext, ScheduleBatch, torch.Tensor], None]
    rebuild_prompt: Callable[[RelayContext, ScheduleBatch, torch.Tensor], None]
    preparation: Preparation
    penalty_tokens: Callable[[RelayContext], PenaltyTokens]
    sampling_tensors: Upload
    isolate: Callable[[RelayContext, Step, Step, ScheduleBatch], AbstractContextManager[None]]


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

    def seed(self, batch: ScheduleBatch, state: DraftState) -> None:
        """Give a prebuilt batch what its drafts start from: the prefill worker's last extend."""
        self.row.seed(self.context, self, batch, state)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRow(DraftPolicies[RelayContext]):
    """The answers of one state for one worker."""

    ends: Ends
    isolated: Callable[[ScheduleBatch], AbstractContextManager[None]]
    seed: Callable[[RelayContext, DraftRelay, ScheduleBatch, DraftState], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relay(RelayPolicies[()]):
    """What one step hands to the next: the policies of ``row``, bound to one run's context.

    The loops ask in the order of ``RelayPolicies``; a policy runs on the caller's stream unless it says otherwise.
    """

    row: RelayRow
    context: RelayContext
    penalty_tokens: PenaltyTokens
    drafts: DraftRelay | None  # where the run speculates

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
        """The relay of a run; its buffers are made on the current stream. ``drafts`` is the row of a run that
        speculates."""
        pages = row.pages(req_to_token)
        context = RelayContext(config, streams, row.futures(config), observer, req_to_token, pages)
        policies = bind(RelayPolicies, row, context)
        draft_relay = None
        if drafts is not None:
            context.isolated = drafts.isolated
            draft_relay = DraftRelay(row=drafts, context=context, **bind(DraftPolicies, drafts, context))
            policies["resolve"] = partial(draft_relay.resolve, policies["resolve"])
        penalty_tokens = row.penalty_tokens(context)
        return cls(row=row, context=context, penalty_tokens=penalty_tokens, drafts=draft_relay, **policies)

    def stage_prompt(self, batch: ScheduleBatch, parts: Parts) -> None:
        """Bring the prompts' tokens, flat, on their way to the device."""
        self.row.stage_prompt(self.context, batch, self._staged(batch, parts))

    def rebuild_prompt(self, batch: ScheduleBatch, parts: Parts) -> None:
        """Replace what ``stage_prompt`` has staged."""
        self.row.rebuild_prompt(self.context, batch, self._staged(batch, parts))

    def _staged(self, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
        return self.row.staging(self.context, self.row.flatten(self.context, batch, parts))

    def isolate(self, batch: ScheduleBatch) -> AbstractContextManager[None]:
        """Resolve the batch and read its page table, then keep the forward inside from changing it."""
        return self.row.isolate(self.context, self.resolve, self.read_tables, batch)

    def isolate_prompt(self, batch: ScheduleBatch) -> AbstractContextManager[None]:
        """As ``isolate``, for a batch of prompts that receives nothing from an earlier forward."""
        return self.row.isolate(self.context, self.resolve_prompt, self.read_tables, batch)
