"""What the policies of one run share: streams, buffers, and references that outlive a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, TypeVarTuple

import torch

from ..batch import DraftState, ScheduleBatch
from ..config import EngineConfig
from ..observe import Observer
from ..streams import Streams
from .futures import DraftBuffers, FutureMap

Step = Callable[[ScheduleBatch], None]
Context = TypeVarTuple("Context")
"""What a policy takes before the arguments of its question: a RelayContext in a row, nothing once it is bound."""


@contextmanager
def sampling_isolated(batch: ScheduleBatch) -> Iterator[None]:
    """The forward samples with a copy of the sampling state."""
    kept = batch.sampling_info
    batch.sampling_info = kept.copy_for_forward()
    try:
        yield
    finally:
        batch.sampling_info = kept


@contextmanager
def fields_isolated(batch: ScheduleBatch) -> Iterator[None]:
    """Restore all fields of the batch, which a speculative worker may have changed."""
    kept = batch.set_fields()
    try:
        with sampling_isolated(batch):
            yield
    finally:
        batch.unset(*batch.set_fields().keys() - kept.keys())
        for name, value in kept.items():
            setattr(batch, name, value)


@dataclass
class RelayContext:
    config: EngineConfig
    streams: Streams
    futures: FutureMap
    observer: Observer
    req_to_token: torch.Tensor  # [rows, context_len] int32, the schedule's page table
    pages: torch.Tensor  # the table that forwards read: the same one, or a copy of their own
    read_done: Any = None  # event after which the last forward reads nothing that the schedule changes
    # References of the last two launches: the caching allocator must not reuse a tensor of the schedule stream before
    # the forward that reads it has run.
    kept_alive: list[list[object]] = field(default_factory=lambda: [[], []])
    launches: int = 0
    # Keeps a forward from changing its batch.
    isolated: Callable[[ScheduleBatch], AbstractContextManager[None]] = sampling_isolated
    publish_ready: Any = None  # event behind which the lengths that were published last may be read
    draft_buffers: DraftBuffers | None = None  # from the first stash of a speculating run on

    @property
    def device(self) -> torch.device:
        return self.config.device

    @property
    def pinned(self) -> bool:
        return self.config.capabilities.pinned_memory

    @cached_property
    def lengths_stream(self) -> Any:
        """The stream that copies published lengths to the host."""
        stream = self.streams.module.Stream()
        self.observer.stream("lengths", stream)
        return stream

    @cached_property
    def pinned_lengths(self) -> torch.Tensor:
        """The host's copy of the published lengths, [rows] int64."""
        return torch.zeros(self.futures.new_seq_lens_buf.shape, dtype=torch.int64, pin_memory=True)

    def store_draft(self, at: torch.Tensor | slice, state: DraftState) -> None:
        """Store a draft's state. The first call makes the buffers, on the current stream."""
        if self.draft_buffers is None:
            self.draft_buffers = DraftBuffers(self.futures.output_tokens_buf.shape[0], state)
        self.draft_buffers.store(at, state)


def bind(policies: type, row: object, context: RelayContext) -> dict[str, Any]:
    """The answers of ``row`` to the questions of the dataclass ``policies``, by name, each bound to ``context``."""
    return {question.name: partial(getattr(row, question.name), context) for question in fields(policies)}
