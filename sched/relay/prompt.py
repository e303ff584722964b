"""How the prompt's token ids get from the host to the forward: ``flatten``, ``staging``, ``stage_prompt``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from ..batch import ScheduleBatch
from .context import RelayContext

Parts = Sequence["array[int]"]


def flatten_list(context: RelayContext, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
    """Walk a Python list of all tokens (before #25098)."""
    with context.observer.range("flatten", batch.step, batch.extend_num_tokens):
        return torch.tensor([token for part in parts for token in part], dtype=torch.int64)


def flatten_numpy(context: RelayContext, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
    """Concatenate int64 buffers (#25098). Views on the parts are gone when this returns: an array cannot grow while
    one is alive."""
    with context.observer.range("flatten_numpy", batch.step, batch.extend_num_tokens):
        return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=np.int64) for part in parts]))


def pinned(context: RelayContext, flat: torch.Tensor) -> torch.Tensor:
    """In a fresh pinned block: torch does not hand it out again before its copy has run."""
    return flat.pin_memory() if context.pinned else flat


def pageable(context: RelayContext, flat: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return flat


def upload_now(context: RelayContext, batch: ScheduleBatch, staged: torch.Tensor) -> None:
    """Copy at once, on the schedule stream: beside the previous forward where no barrier stands between."""
    batch.input_ids = staged.to(context.device, non_blocking=True)


def keep_staged(context: RelayContext, batch: ScheduleBatch, staged: torch.Tensor) -> None:  # noqa: ARG001
    """Leave the copy to the forward stream (#25945)."""
    batch.prefill_input_ids_cpu = staged
