"""States that drafts start from, at the indices of the FutureMap. Only forwards write and read them."""

from __future__ import annotations

import torch

from ..batch import DraftState
from .futures import UNSTASHED


class DraftBuffers:
    """A buffer [rows, ...] for each part of the draft's state, shaped after the first one that is stored."""

    def __init__(self, rows: int, first: DraftState) -> None:
        self._buffers = DraftState(*(_like(part, rows) for part in first))

    def store(self, at: torch.Tensor | slice, state: DraftState) -> None:
        for buffer, part in zip(self._buffers, state, strict=True):
            buffer[at] = part

    def gather(self, at: torch.Tensor) -> DraftState:
        return DraftState(*(buffer[at] for buffer in self._buffers))


def _like(one: torch.Tensor, rows: int) -> torch.Tensor:
    """A buffer of values from which no draft could start."""
    value = torch.nan if one.is_floating_point() else UNSTASHED
    return torch.full((rows, *one.shape[1:]), value, dtype=one.dtype, device=one.device)
