"""How the prompt's token ids get from the host to the forward."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from ..batch import ScheduleBatch
from .context import RelayContext

Parts = Sequence["array[int]"]


def flatten_list(context: RelayContext, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
    """Build a Python list of all tokens (before #25098)."""
    with context.observer.range("flatten", batch.step, batch.extend_num_tokens):
        return torch.tensor([token for part in parts for token in part], dtype=torch.int64)


def flatten_numpy(context: RelayContext, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
    """Concatenate int64 buffers (#25098). The views of the parts are freed on return: an array with a live view cannot
    grow."""
    with context.observer.range("flatten_numpy", batch.step, batch.extend_num_tokens):
        return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=np.int64) for part in parts]))


def pinned(context: RelayContext, flat: torch.Tensor) -> torch.Tensor:
    """Stage in a fresh pinned block, which torch does not reuse before its copy has run."""
    return flat.pin_memory() if context.pinned else flat


def pageable(context: RelayContext, flat: torch.Tensor) -> torch.Tensor:
    return flat


def upload_now(context: RelayContext, batch: ScheduleBatch, staged: torch.Tensor) -> None:
    """Copy at once on the schedule stream, beside the previous forward unless a barrier orders the two."""
    batch.input_ids = staged.to(context.device, non_blocking=True)


def keep_staged(context: RelayContext, batch: ScheduleBatch, staged: torch.Tensor) -> None:
    """Leave the copy to the forward stream (#25945)."""
    batch.prefill_input_ids_cpu = staged
