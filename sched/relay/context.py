"""What the policies of one run share: streams, buffers, and the ring of references that outlive a launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVarTuple

import torch

from ..batch import DraftState, ScheduleBatch
from ..config import EngineConfig
from ..observe import Observer
from ..streams import Streams
from .draft_buffers import DraftBuffers
from .futures import FutureMap
from .isolation import sampling_isolated

Step = Callable[[ScheduleBatch], None]
Context = TypeVarTuple("Context")
"""What a policy takes before the arguments of its question: a RelayContext in a row, nothing once it is bound."""


@dataclass(slots=True)
class RelayContext:
    config: EngineConfig
    streams: Streams
    futures: FutureMap
    observer: Observer
    req_to_token: torch.Tensor  # [rows, context_len] int32, the schedule's page table
    pages: torch.Tensor  # the table that forwards read: the same one, or a copy of their own
    read_done: Any = None  # event after which the last forward reads nothing that the schedule changes
    # Two launches' worth of references: a tensor of the schedule stream must not be re-issued by the caching
    # allocator before the forward that reads it has run.
    ring: list[list[object]] = field(default_factory=lambda: [[], []])
    launches: int = 0
    # What a forward may not change of its batch.
    isolated: Callable[[ScheduleBatch], AbstractContextManager[None]] = sampling_isolated
    publish_ready: Any = None  # event behind which the lengths that were published last may be read
    drafts: DraftBuffers | None = None
    private: Any = None  # stream that brings published lengths to the host
    lengths_pinned: torch.Tensor | None = None  # [rows] int64, where it brings them

    @property
    def device(self) -> torch.device:
        return self.config.device

    def private_stream(self) -> Any:
        """Made when first asked for."""
        if self.private is None:
            self.private = self.streams.module.Stream()
            self.observer.stream("lengths", self.private)
        return self.private

    def pinned_lengths(self) -> torch.Tensor:
        """[rows] int64 of the host."""
        if self.lengths_pinned is None:
            self.lengths_pinned = torch.zeros(
                self.futures.new_seq_lens_buf.shape, dtype=torch.int64, pin_memory=True
            )
        return self.lengths_pinned

    def draft_buffers(self, first: DraftState) -> DraftBuffers:
        """The buffers of the drafts' states, made on the current stream when the ``first`` one is stored."""
        if self.drafts is None:
            self.drafts = DraftBuffers(self.futures.output_tokens_buf.shape[0], first)
        return self.drafts

    @property
    def pinned(self) -> bool:
        return self.config.capabilities.pinned_memory


def bind(policies: type, row: object, context: RelayContext) -> dict[str, Any]:
    """The answers of ``row`` to the questions of the dataclass ``policies``, by name, each bound to ``context``."""
    return {question.name: partial(getattr(row, question.name), context) for question in fields(policies)}
