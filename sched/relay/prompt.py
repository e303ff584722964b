"""How the prompt's token ids get from the host to the forward: ``flatten``, ``staging``, ``stage_prompt``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from ..batch import ScheduleBatch
from .desk import Desk

Parts = Sequence["array[int]"]


def flatten_list(desk: Desk, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
    """Walk a Python list of all tokens (before #25098)."""
    with desk.observer.range("flatten", batch.step, batch.extend_num_tokens):
        return torch.tensor([token for part in parts for token in part], dtype=torch.int64)


def flatten_numpy(desk: Desk, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
    """Concatenate int64 buffers (#25098). Views on the parts are gone when this returns: an array cannot grow while
    one is alive."""
    with desk.observer.range("flatten_numpy", batch.step, batch.extend_num_tokens):
        return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=np.int64) for part in parts]))


def pinned(desk: Desk, flat: torch.Tensor) -> torch.Tensor:
    """In a fresh pinned block: torch does not hand it out again before its copy has run."""
    return flat.pin_memory() if desk.pinned else flat


def pageable(desk: Desk, flat: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return flat


def upload_now(desk: Desk, batch: ScheduleBatch, staged: torch.Tensor) -> None:
    """Copy at once, on the schedule stream: beside the previous forward where no barrier stands between."""
    batch.input_ids = staged.to(desk.device, non_blocking=True)


def keep_staged(desk: Desk, batch: ScheduleBatch, staged: torch.Tensor) -> None:  # noqa: ARG001
    """Leave the copy to the forward stream (#25945)."""
    batch.prefill_input_ids_cpu = staged
