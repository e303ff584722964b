"""What drafts start from, by place in the FutureMap: written and read by forwards alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..batch import DraftInput
from .futures import UNSTASHED

_FIELDS = ("topk_p", "topk_index", "hidden_states")


class DraftBuffers:
    """[rows, ...] each, shaped after the first input that is stored: only then its shape is known."""

    def __init__(self, rows: int, first: DraftInput) -> None:
        self._buffers = {name: _like(getattr(first, name), rows) for name in _FIELDS}

    def store(self, at: torch.Tensor | slice, draft: DraftInput) -> None:
        for name, buffer in self._buffers.items():
            buffer[at] = getattr(draft, name)

    def gather(self, at: torch.Tensor, draft: DraftInput) -> DraftInput:
        """``draft`` with what is stored for it."""
        topk_p, topk_index, hidden_states = (buffer[at] for buffer in self._buffers.values())
        return replace(draft, topk_p=topk_p, topk_index=topk_index, hidden_states=hidden_states)


def _like(one: torch.Tensor, rows: int) -> torch.Tensor:
    """Of nothing that a draft could start from."""
    value = torch.nan if one.is_floating_point() else UNSTASHED
    return torch.full((rows, *one.shape[1:]), value, dtype=one.dtype, device=one.device)
