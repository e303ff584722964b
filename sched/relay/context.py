"""What the policies of one run share: streams, the buffers that one forward leaves to the next step (upstream
``FutureMap``), and references that outlive a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, TypeVarTuple

import torch

from ..batch import DraftState, FutureIndices, ScheduleBatch
from ..config import EngineConfig
from ..observe import Observer
from ..streams import Streams

Step = Callable[[ScheduleBatch], None]
Context = TypeVarTuple("Context")
"""What a policy takes before the arguments of its question: a RelayContext in a row, nothing once it is bound."""

# A row before its first stash. No token id is negative, so that a gather before the first stash is visible.
UNSTASHED = -1


class FutureMap:
    """Indexed by request slot: ``rows`` = slots + 1; row 0 is padding, shared with padded graph rows.

    ``output_tokens_buf`` [rows] int64 is read by the next forward, ``new_seq_lens_buf`` [rows] int64 by the schedule.
    Both are written on the current stream.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.output_tokens_buf = torch.full((rows,), UNSTASHED, dtype=torch.int64, device=device)
        self.new_seq_lens_buf = torch.full((rows,), UNSTASHED, dtype=torch.int64, device=device)

    def take(self, rows: torch.Tensor) -> FutureIndices:
        """Where the tokens of the requests in ``rows`` [b] will be: in the requests' own rows."""
        return FutureIndices(rows, None)

    def stash(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Store each request's next input token. rows, token_ids: [b]."""
        if rows.shape[0] == 0:
            return
        self.output_tokens_buf[rows] = token_ids.to(torch.int64)

    def publish(self, rows: torch.Tensor, new_seq_lens: torch.Tensor) -> None:
        """Store each request's next length for the schedule. rows, new_seq_lens: [b] int64."""
        if rows.shape[0] == 0:
            return
        self.new_seq_lens_buf[rows] = new_seq_lens


class FutureRing(FutureMap):
    """Indexed by a counter that wraps at ``limit`` (before #25862): every step of a request takes a new slot.

    A slot must not be reused before its token was read, so the limit counts each request's chunks::

        0  1 ................ limit | ........ limit + 2 * max_running_requests
        |  |-- first slots lie here |-- the rest of a step's slots may reach here
        never used: a placeholder is the slot's negative, and -0 is not negative
    """

    def __init__(self, limit: int, *, most: int, device: torch.device) -> None:
        super().__init__(limit + 2 * most, device)
        self.limit = limit
        self._count = 0

    def take(self, rows: torch.Tensor) -> FutureIndices:
        """The next slots, one for each of ``rows`` [b]; a kernel on the current stream writes their numbers."""
        start = self._count + 1
        end = start + rows.shape[0]
        self._count = (self._count + rows.shape[0]) % self.limit
        return FutureIndices(torch.arange(start, end, device=rows.device), slice(start, end))


def pooled(config: EngineConfig) -> FutureMap:
    return FutureMap(config.max_running_requests + 1, config.device)


def ringed(config: EngineConfig) -> FutureMap:
    most, chunk = config.max_running_requests, config.chunked_prefill_size
    chunks = -(-config.context_len // chunk) if chunk else 0
    return FutureRing(most * (3 + chunks), most=most, device=config.device)


def _like(one: torch.Tensor, rows: int) -> torch.Tensor:
    """A buffer of values from which no draft could start."""
    value = torch.nan if one.is_floating_point() else UNSTASHED
    return torch.full((rows, *one.shape[1:]), value, dtype=one.dtype, device=one.device)


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
    # [rows, ...] for each part of a draft's state, from the first stash of a speculating run on
    draft_buffers: DraftState | None = None

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
        """Store a draft's state. The first call makes the buffers after its shape, on the current stream."""
        if self.draft_buffers is None:
            rows = self.futures.output_tokens_buf.shape[0]
            self.draft_buffers = DraftState(*(_like(part, rows) for part in state))
        for buffer, part in zip(self.draft_buffers, state, strict=True):
            buffer[at] = part


def bind(policies: type, row: object, context: RelayContext) -> dict[str, Any]:
    """The answers of ``row`` to the questions of the dataclass ``policies``, by name, each bound to ``context``."""
    return {question.name: partial(getattr(row, question.name), context) for question in fields(policies)}
