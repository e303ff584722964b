"""The batch as the scheduler carries it, as the model sees it, and what a step returns.

Field names are upstream's (SGLang ``ScheduleBatch``, ``ForwardBatch``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, Self

import torch

if TYPE_CHECKING:
    from .request import Request


class ForwardMode(Enum):
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"

    @property
    def is_extend(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    @property
    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


class RowState(Protocol):
    """State with one row per request of a batch, on host and device (sampling parameters, penalties)."""

    def filter(self, keep: Sequence[int], keep_device: torch.Tensor) -> None:
        """Keep rows ``keep``, in that order; ``keep_device`` is the same list on the device, int64."""

    def merge(self, other: Self) -> None:
        """Append the other's rows."""


@dataclass(slots=True, eq=False)
class ForwardBatch:
    """One forward, as the model sees it. b = batch_size, T = num_tokens; requests' tokens lie one
    after the other. In decode every request has one token, T == b, and the extend fields are None.
    """

    mode: ForwardMode
    batch_size: int
    num_tokens: int
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    req_pool_indices: torch.Tensor  # [b] int64, rows of req_to_token
    seq_lens: torch.Tensor  # [b] int64, including the tokens of this forward
    out_cache_loc: torch.Tensor  # [T] int64, KV slots to write
    max_seq_len: int  # host bound on seq_lens
    extend_lens: torch.Tensor | None = None  # [b] int32, new tokens per request
    max_extend_len: int = 1
    sampling_info: RowState | None = None


@dataclass(slots=True)
class ModelOutput:
    """logits [b, vocab] float32 of each request's last token. fingerprint [b] int64 only with values
    none, where the next token follows from the KV tags instead of the logits."""

    logits: torch.Tensor
    fingerprint: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class StepResult:
    """What one launch leaves behind for the settling one iteration later."""

    next_token_ids: torch.Tensor | None  # [b] int64 on the device; None while sampling is delayed
    next_token_ids_cpu: torch.Tensor | None = None  # pinned, readable after copy_done
    next_token_logprobs: torch.Tensor | None = None  # [b] float32 on the device
    next_token_logprobs_cpu: torch.Tensor | None = None
    copy_done: torch.Event | None = None
    delay_sample_func: Callable[[], None] | None = None
    extra_keep_alive_refs: list[object] = field(default_factory=list)
